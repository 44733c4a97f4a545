"""Kills processes of a running job at random moments and measures what that costs; plain torchrun beside it.

    python -m benchmarks.survival --runs 20

Every run is 20 steps of a tiny Llama on 6 nodes of one process, of which a copy needs 2 and 2 may be lost. Two are
killed with SIGKILL one after the other, one of them rank 0 or the first stage of a pipeline. A run counts if every step
was committed once, every sample id came once, losses equal those of the run without kills to 1e-5, and the first step
after each kill was committed within 5 seconds.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from optimum_trn.elastic.journal import read_journal

REPOSITORY = Path(__file__).resolve().parent.parent
JOB = Path(__file__).with_name("survival_job.py")
START_SECONDS = 180.0


@dataclass
class Outcome:
    """What the journal of a job says, and when who was killed (seconds of the monotonic clock)."""

    code: int
    journal: list[dict]
    kills: list[dict] = field(default_factory=list)
    said: str = ""  # the ends of the output of all processes

    @property
    def commits(self) -> list[dict]:
        return [event for event in self.journal if event["event"] == "committed"]

    @property
    def losses(self) -> list[float]:
        """Of every step: what Trainer would log."""
        return [sum(event["losses"]) for event in self.commits]

    @property
    def samples(self) -> list[int]:
        return [sample for event in self.commits for batch in event["samples"] for sample in batch]

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each kill to the first step that a generation without the victim has committed."""
        found = []
        for kill in self.kills:
            without = {
                event["generation"]
                for event in self.journal
                if event["event"] == "prepared" and kill["member"] not in [m["member"] for m in event["members"]]
            }
            after = [c["monotonic"] for c in self.commits if c["generation"] in without and c["monotonic"] > kill["at"]]
            found.append(min(after, default=float("inf")) - kill["at"])
        return found


class Job:
    """A job of `optimum-trn launch` that is running."""

    def __init__(self, directory: Path, nodes: int, losses: int, *arguments: str, launch: tuple[str, ...] = ()) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "optimum_trn.cli", "launch", "--nodes", str(nodes), "-f", str(losses)]
        command += ["--directory", str(directory), *launch, str(JOB), str(directory), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        environment.setdefault("OPTIMUM_TRN_DEVICE", "cpu")
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
        self.kills: list[dict] = []

    def journal(self, event: str | None = None) -> list[dict]:
        return read_journal(self.directory / "journal.jsonl", event)

    def wait_for(self, event: str, count: int, seconds: float = START_SECONDS) -> list[dict]:
        """The events of that kind, as soon as there are so many."""
        deadline = time.monotonic() + seconds
        while len(found := self.journal(event)) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"no {count} times {event!r} in {self.directory}:\n{self.said()}")
            time.sleep(0.005)
        return found

    def kill(self, member: int) -> None:
        """End the process of a member without a warning."""
        pid = next(e["pid"] for e in self.journal("started") if e["member"] == member and e["role"] == "worker-0")
        os.kill(pid, signal.SIGKILL)
        self.kills.append({"member": member, "at": time.monotonic()})

    def finish(self, seconds: float = START_SECONDS) -> Outcome:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the job in {self.directory} did not end:\n{self.said()}") from None
        return Outcome(code, self.journal(), self.kills, self.said())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the kernel ends what it has started
        self.process.wait()

    def said(self, characters: int = 1500) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}: {log.read_text(errors='replace')[-characters:]}" for log in logs)


def first_stages(job: Job) -> list[int]:
    """The members that have the first stages of the pipelines as they are now."""
    return [pipeline[0] for pipeline in job.journal("active")[-1]["plan"]["pipelines"]]


def disturbed(directory: Path, draw: random.Random, nodes: int = 6, losses: int = 2, steps: int = 20) -> Outcome:
    """A run in which as many nodes as may be lost are killed, one after the other, at random moments."""
    job = Job(directory, nodes, losses, "--steps", str(steps))
    try:
        moments = sorted(draw.sample(range(1, steps - 2), losses))
        special = draw.randrange(losses)  # which of the kills is that of a first stage
        for place, moment in enumerate(moments):
            job.wait_for("committed", moment)
            alive = [m["member"] for m in job.journal("prepared")[-1]["members"]]
            alive = [member for member in alive if member not in [kill["member"] for kill in job.kills]]
            firsts = [member for member in {alive[0], *first_stages(job)} if member in alive]
            victim = draw.choice(sorted(firsts) if place == special else alive)
            time.sleep(draw.uniform(0, 0.1))  # anywhere within a step
            job.kill(victim)
        return job.finish()
    finally:
        job.end()


def undisturbed(directory: Path, nodes: int = 6, losses: int = 2, steps: int = 20, *arguments: str) -> Outcome:
    """The same run without kills."""
    job = Job(directory, nodes, losses, "--steps", str(steps), *arguments)
    try:
        return job.finish()
    finally:
        job.end()


def faults(outcome: Outcome, reference: Outcome, seconds: float = 5.0) -> list[str]:
    """What a run has not kept of the promise."""
    found = []
    if outcome.code:
        found.append(f"the job ended with {outcome.code}")
    if [event["step"] for event in outcome.commits] != [event["step"] for event in reference.commits]:
        found.append(f"steps {[event['step'] for event in outcome.commits]}")
    if outcome.samples != reference.samples or len(set(outcome.samples)) != len(outcome.samples):
        found.append("other sample ids")
    pairs = zip(outcome.losses, reference.losses, strict=False)
    difference = max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=float("inf"))
    if not difference <= 1e-5:
        found.append(f"losses differ by {difference:.1e}")
    if max(outcome.recoveries, default=0.0) > seconds:
        found.append(f"recovery took {outcome.recoveries}")
    return found


def torchrun_seconds(directory: Path, moment: int = 8, steps: int = 20, save_steps: int = 5) -> dict:
    """The same kill under plain torchrun, which starts all ranks again from the last checkpoint on the disk."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6", "--max-restarts", "1"]
    command += ["--standalone", str(JOB), str(directory), "--torchrun", "--steps", str(steps)]
    command += ["--save-steps", str(save_steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    environment["OPTIMUM_TRN_DEVICE"] = "cpu"
    log = (directory / "log").open("w")
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    clock = directory / "clock"

    def done() -> list[tuple[int, float, int]]:
        lines = clock.read_text().splitlines() if clock.exists() else []
        return [(int(step), float(at), int(pid)) for step, at, pid in (line.split() for line in lines)]

    deadline = time.monotonic() + START_SECONDS
    while not [step for step, _, _ in done() if step >= moment]:
        assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()[-3000:]
        time.sleep(0.005)
    os.kill(done()[-1][2], signal.SIGKILL)
    at, reached = time.monotonic(), max(step for step, _, _ in done())
    code = process.wait(START_SECONDS)
    after = [entry for entry in done() if entry[1] > at]
    return {
        "code": code,
        "seconds to the first step": after[0][1] - at,
        "seconds to a new step": next(when for step, when, _ in after if step > reached) - at,
        "committed steps lost": reached - after[0][0] + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without-torchrun", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    results: dict = {"runs": []}
    with tempfile.TemporaryDirectory(prefix="survival-") as temporary:
        if not options.without_torchrun:
            results["torchrun"] = torchrun_seconds(Path(temporary, "torchrun"))
            print(f"torchrun: {results['torchrun']}", flush=True)
        reference = undisturbed(Path(temporary, "undisturbed"))
        assert reference.code == 0, "the run without kills failed"
        for run in range(options.runs):
            outcome = disturbed(Path(temporary, f"run-{run}"), draw)
            wrong = faults(outcome, reference)
            results["runs"].append({"recoveries": outcome.recoveries, "faults": wrong})
            seconds = ", ".join(f"{value:.2f}" for value in outcome.recoveries)
            print(f"run {run}: first committed step after {seconds} s; {'; '.join(wrong) or 'kept'}", flush=True)
            if wrong:
                print(outcome.said, flush=True)
    every = [value for run in results["runs"] for value in run["recoveries"]]
    kept = sum(not run["faults"] for run in results["runs"])
    median, worst = statistics.median(every), max(every)
    print(f"{kept} of {options.runs} runs kept; seconds to a step: median {median:.2f}, worst {worst:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    raise SystemExit(kept < options.runs)


if __name__ == "__main__":
    main()
