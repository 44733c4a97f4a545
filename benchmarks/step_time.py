"""Step time and memory of training through us against stock ways on the same two cores, as ratios of one run.

    python -m benchmarks.step_time                  # all lines; each is kept in docs/performance.json when it is done
    python -m benchmarks.step_time --lines tp2-60M  # measure some of them again
    python -m benchmarks.step_time --resume         # only those that this commit has no valid result for

Contenders of a line take turns (alternating.py); a ratio is the median over neighbouring turns, with its quartiles. A
line is void, and says so, unless a product of matrices is 1.85 times as fast on two threads as on one before and after
it: background load flatters two processes. All was measured, nothing simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import PARALLEL, ROOT, Ratio, alternate, parallel_speed
from benchmarks.contenders import Case, Contender

RESULTS = ROOT / "docs" / "performance.json"

LARGE = Case(512, 1408, 8, 8, 4, 32_000, 4, 256)  # 60M
SMALL = Case(256, 688, 4, 8, 4, 8_000, 4, 128)
TINY = Case(128, 352, 4, 4, 2, 2_048, 2, 64)
CASES = {"60M": LARGE, "small": SMALL, "tiny": TINY}

KEPT = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
"""malloc keeps what it gets, instead of paying page faults for it in every step."""

TP2: dict[str, Any] = dict(tensor_parallel_size=2, fuse_qkv=True, fuse_gate_up=True)


def ours(case: Case, ranks: int = 2, dtype: str = "float32", **arguments: Any) -> Contender:
    return Contender("ours", case, ranks, 1, arguments, dtype)


def stock(case: Case, ranks: int = 1, threads: int = 2, dtype: str = "float32", **environment: str) -> Contender:
    return Contender("stock", case, ranks, threads, {}, dtype, environment)


class Line:
    """The result of one line: seconds, ratios with what they have to be, and what else was seen."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ratios: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, Any] = {}

    def times(self, said: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
        """Seconds by contender and turn; the medians are kept."""
        times = {name: [answer["seconds"] for answer in answers] for name, answers in said.items()}
        self.seconds |= {name: statistics.median(values) for name, values in times.items()}
        return times

    def claim(self, what: str, ratio: Ratio, at_most: float | None = None, at_least: float | None = None) -> None:
        met = (at_most is None or ratio.median <= at_most) and (at_least is None or ratio.median >= at_least)
        bound = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
        self.ratios[what] = {**asdict(ratio), "bound": bound, "met": met}

    def same_losses(self, said: dict[str, list[dict[str, Any]]], tolerance: float) -> None:
        """All contenders have to have begun with the same loss; later ones differ where only a Trainer clips."""
        losses = {name: answers[-1]["first"] for name, answers in said.items() if answers[-1]["first"]}
        if max(losses.values()) - min(losses.values()) > tolerance * max(losses.values()):
            raise RuntimeError(f"The losses of the first step differ, which compares nothing: {losses}")
        self.notes["losses"] = losses


def tensor_parallel(name: str, one: float, other: float, turns: int, steps: int) -> Line:
    """TP2 against one process with two threads, transformers' TP2, and its own matrix products."""
    case, line = CASES[name], Line()
    contenders = {
        "TP2": ours(case, **TP2),
        "one process": stock(case),
        "one process, malloc keeps": stock(case, **KEPT),
        "native TP2": Contender("native", case, 2, environment=KEPT),
        "products": Contender("products", case, 2, environment=KEPT),
    }
    said = alternate(contenders, turns, steps)
    times = line.times(said)
    line.same_losses(said, 1e-5)
    best = min("one process", "one process, malloc keeps", key=lambda key: line.seconds[key])
    line.claim(f"TP2 against {best}", Ratio.of(times["TP2"], times[best]), at_most=one)
    line.claim("native TP2 against TP2", Ratio.of(times["native TP2"], times["TP2"]), at_least=other)
    fastest = min(times["products"])
    line.claim("TP2 against its products", Ratio.of(times["TP2"], [fastest] * turns), at_most=1.25)
    return line


def bfloat16() -> Line:
    """TP2 of a bfloat16 model, with float32 master weights, against its own products."""
    line, turns = Line(), 5
    said = alternate(
        {
            "TP2, bfloat16": ours(LARGE, dtype="bfloat16", **TP2),
            "products, bfloat16": Contender("products", LARGE, 2, dtype="bfloat16", environment=KEPT),
        },
        turns,
    )
    times = line.times(said)
    ratio = Ratio.of(times["TP2, bfloat16"], [min(times["products, bfloat16"])] * turns)
    line.claim("TP2 against its products, bfloat16", ratio, at_most=1.25)
    return line


def data_parallel() -> Line:
    """DP2 against DistributedDataParallel, ZeRO-1 against FSDP2."""
    line = Line()
    contenders = {
        "DP2": ours(LARGE, zero_1=False),
        "DDP": stock(LARGE, ranks=2, threads=1, **KEPT),
        "ZeRO-1": ours(LARGE),
        "FSDP2": Contender("fsdp2", LARGE, 2, environment=KEPT),
    }
    said = alternate(contenders, 5)
    times = line.times(said)
    line.same_losses(said, 1e-5)
    line.claim("DDP against DP2", Ratio.of(times["DDP"], times["DP2"]), at_least=1.10)
    line.claim("FSDP2 against ZeRO-1", Ratio.of(times["FSDP2"], times["ZeRO-1"]), at_least=1.2)
    return line


def device(name: str, bound: float, turns: int, steps: int) -> Line:
    """The device against the CPU, both in one process with one thread."""
    case, line = CASES[name], Line()
    said = alternate({"neuron": ours(case, 1), "cpu": stock(case, threads=1, **KEPT)}, turns, steps)
    times = line.times(said)
    line.same_losses(said, 1e-5)
    line.claim("neuron against cpu", Ratio.of(times["neuron"], times["cpu"]), at_most=bound)
    return line


def compiled(name: str, bound: float, turns: int, steps: int) -> Line:
    """torch_compile=True against eager, on one core."""
    case, line = CASES[name], Line()
    said = alternate({"eager": ours(case, 1), "compiled": ours(case, 1, torch_compile=True)}, turns, steps)
    times = line.times(said)
    line.same_losses(said, 1e-5)
    graphs = {answer["graphs"] for answer in said["compiled"]}
    if len(graphs) != 1:
        raise RuntimeError(f"The number of graphs changed after warm-up: {graphs}")
    line.notes["graphs"] = graphs.pop()
    line.claim("eager against compiled", Ratio.of(times["eager"], times["compiled"]), at_least=bound)
    return line


def memory() -> Line:
    """Peak device memory of a core, against transformers' TP2 on the same device."""
    line = Line()
    said = alternate(
        {"TP2": ours(LARGE, **TP2), "native TP2": Contender("native", LARGE, 2, 1, {"device": "neuron"})}, 2, 1, 1
    )
    peaks = {name: answers[-1]["peak"] for name, answers in said.items()}
    line.notes["peaks"] = peaks
    ratio = peaks["TP2"] / peaks["native TP2"]
    line.claim("TP2 against native TP2, peak bytes", Ratio(ratio, ratio, ratio), at_most=0.7)
    return line


def growth_by_layers() -> Line:
    """TP2 of 2, 4, 8 and 16 layers: how far step times are from a straight line."""
    line = Line()
    layers = (2, 4, 8, 16)
    case = replace(LARGE, vocabulary=8_000)
    said = alternate({str(count): ours(replace(case, layers=count), **TP2) for count in layers}, 4)
    times = [statistics.median(values) for values in line.times(said).values()]
    slope, intercept = statistics.linear_regression(layers, times)
    off = max(abs(seconds / (intercept + slope * count) - 1) for count, seconds in zip(layers, times, strict=True))
    line.notes |= {"slope": slope, "intercept": intercept}
    line.claim("farthest from a line, over it", Ratio(1 + off, 1 + off, 1 + off), at_most=1.1)
    return line


def growth_by_ranks() -> Line:
    """The same work on 1, 2 and 4 cores of the device, of which the machine has 2: ranks beyond them cost nothing."""
    line = Line()
    case = replace(LARGE, vocabulary=8_000)
    contenders = {"1": ours(case, 1)} | {str(n): ours(case, n, **{**TP2, "tensor_parallel_size": n}) for n in (2, 4)}
    times = line.times(alternate(contenders, 4))
    line.claim("2 ranks against half of 1", Ratio.of(times["2"], [t / 2 for t in times["1"]]), at_most=1.1)
    line.claim("4 ranks against 2", Ratio.of(times["4"], times["2"]), at_most=1.1)
    return line


LINES: dict[str, Callable[[], Line]] = {
    "tp2-60M": lambda: tensor_parallel("60M", 0.93, 1.6, 6, 1),
    "tp2-small": lambda: tensor_parallel("small", 1.05, 2.1, 8, 5),
    "tp2-bfloat16": bfloat16,
    "data-parallel": data_parallel,
    "device-60M": lambda: device("60M", 1.00, 5, 1),
    "device-tiny": lambda: device("tiny", 1.04, 12, 20),
    "compiled-60M": lambda: compiled("60M", 1.02, 5, 1),
    "compiled-tiny": lambda: compiled("tiny", 1.10, 12, 20),
    "memory": memory,
    "growth-layers": growth_by_layers,
    "growth-ranks": growth_by_ranks,
}


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()


def measure(name: str) -> dict[str, Any]:
    """One line, with the check that the machine was ours."""
    started, before = time.time(), parallel_speed()
    line = LINES[name]()
    after = parallel_speed()
    return {
        "what": LINES[name].__doc__ or "",
        "commit": commit(),
        "parallel": [before, after],
        "void": min(before, after) < PARALLEL,
        "took": time.time() - started,
        **vars(line),
    }


def replace_section(page: Path, name: str, text: str) -> None:
    """Put `text` between the comments of that name in a page of the docs."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + text + "\n" + end + rest.partition(end)[2])


def report(name: str, result: dict[str, Any]) -> str:
    speeds = ", ".join(f"{speed:.2f}" for speed in result["parallel"])
    lines = [f"{name} ({result['took']:.0f} s; 2 threads {speeds} times as fast{' : VOID' if result['void'] else ''})"]
    lines += [f"    {who:28} {1e3 * seconds:9.1f} ms" for who, seconds in result["seconds"].items()]
    lines += [
        f"    {what:44} {r['median']:.3f} ({r['lower']:.3f}-{r['upper']:.3f}), {r['bound']}: "
        f"{'met' if r['met'] else 'MISSED'}"
        for what, r in result["ratios"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has a valid result for")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    failed = []
    for name in options.lines:
        results = json.loads(options.results.read_text()) if options.results.exists() else {}
        known = results.get(name)
        if options.resume and known is not None and known["commit"] == commit() and not known["void"]:
            continue
        try:
            results[name] = measure(name)
        except RuntimeError as error:
            failed.append(name)
            print(f"{name} FAILED: {error}", flush=True)
            continue
        options.results.write_text(json.dumps(results, indent=1) + "\n")
        print(report(name, results[name]), flush=True)
    if failed:
        sys.exit(f"No result for {', '.join(failed)}.")


if __name__ == "__main__":
    main()
