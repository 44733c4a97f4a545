"""The controller: who is lost is out of the next generation, who comes back is another member, its death ends all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optimum_trn.elastic.journal import read_journal
from optimum_trn.elastic.membership import Member, Snapshot

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import sys, time
from optimum_trn.elastic.membership import Membership
membership = Membership.from_environment()
membership.announce()
generation = 0
while True:
    generation = membership.wait(0, lambda: membership.generation > generation and membership.generation)
    members = [member.member for member in membership.snapshot(generation).members]
    if membership.member == members[0]:
        membership.store.set(f"active/{generation}", "[]")
    if len(members) == int(sys.argv[1]) and generation > 1:
        break
"""


def launch(tmp_path, *arguments, script=SCRIPT):
    (tmp_path / "script.py").write_text(script.replace("membership.wait(0,", "membership.wait(10**9,"))
    command = [sys.executable, "-m", "optimum_trn.cli", "launch", "--directory", str(tmp_path), *arguments]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OPTIMUM_TRN_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def wait_for(tmp_path, process, event, count=1, seconds=120):
    """The events of the journal of that kind, as soon as there are so many."""
    deadline = time.monotonic() + seconds
    while len(found := read_journal(tmp_path / "journal.jsonl", event)) < count:
        assert process.poll() is None, f"the job ended with {process.poll()} before {event!r}"
        assert time.monotonic() < deadline, f"no {event!r}: {(tmp_path / 'journal.jsonl').read_text()}"
        time.sleep(0.02)
    return found


def workers(events):
    return {event["member"]: event["pid"] for event in events if event["role"].startswith("worker")}


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def test_a_killed_node_leaves_the_next_generation_and_comes_back_as_another_member(tmp_path):
    process = launch(tmp_path, "--nodes", "2", "--max-restarts", "1", str(tmp_path / "script.py"), "2")
    try:
        wait_for(tmp_path, process, "active")
        os.kill(workers(read_journal(tmp_path / "journal.jsonl", "started"))[0], signal.SIGKILL)
        assert process.wait(120) == 0
    finally:
        end(process)
    journal = read_journal(tmp_path / "journal.jsonl")
    members = [[m["member"] for m in event["members"]] for event in journal if event["event"] == "prepared"]
    assert members == [[0, 1], [1], [1, 2]]
    assert [event["codes"] for event in journal if event["event"] == "lost"] == [[-signal.SIGKILL]]
    assert journal[-1]["event"] == "ended" and journal[-1]["code"] == 0


@pytest.mark.full
def test_when_the_controller_dies_the_kernel_ends_its_processes(tmp_path):
    process = launch(tmp_path, "--nodes", "2", str(tmp_path / "script.py"), "9")
    try:
        wait_for(tmp_path, process, "active")
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        for pid in workers(read_journal(tmp_path / "journal.jsonl", "started")).values():
            deadline = time.monotonic() + 60
            while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                assert time.monotonic() < deadline, f"{pid} is alive"
                time.sleep(0.02)
    finally:
        end(process)


@pytest.mark.full
def test_a_job_of_which_nothing_is_left_fails(tmp_path):
    process = launch(tmp_path, "--nodes", "1", str(tmp_path / "script.py"), script="raise SystemExit(3)")
    assert process.wait(120) == 1
    assert read_journal(tmp_path / "journal.jsonl", "lost")[0]["codes"] == [3]


def test_a_snapshot_is_the_one_that_was_written():
    snapshot = Snapshot(3, (Member(0, 0, (11,)), Member(7, 1, (12, 13))))
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    changed = json.loads(snapshot.to_json()) | {"generation": 4}
    with pytest.raises(ValueError, match="hash"):
        Snapshot.from_json(json.dumps(changed))
