"""PyTorch's own operator database, forward and gradient, on the device against the CPU, to the last bit."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REASONS: dict[str, str] = json.loads(Path(__file__).with_name("opinfo_failures.json").read_text())
WORKERS = 2
DTYPES = ("float32", pytest.param("bfloat16", marks=pytest.mark.full))


def slices(dtype: str) -> Iterator[dict[str, Any]]:
    """Results of all operators; a worker that crashes is started again behind the operator that killed it."""
    workers: dict[int, subprocess.Popen[str]] = {}
    next_index = dict(enumerate(range(WORKERS)))

    def start(number: int) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.device.opinfo_worker",
            dtype,
            str(next_index[number]),
            "100000",
            str(WORKERS),
        ]
        workers[number] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for number in next_index:
        start(number)
    for number in next_index:
        while True:
            out, err = workers[number].communicate(timeout=300)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            yield from (line for line in lines if not line.get("started"))
            if workers[number].returncode == 0:
                break
            if not lines or not lines[-1].get("started"):
                raise RuntimeError(f"A worker failed before its first operator:\n{err[-2000:]}")
            crashed = lines[-1]
            yield {
                **crashed,
                "tried": 1,
                "passed": 0,
                "failure": f"the process died with code {workers[number].returncode}",
            }
            next_index[number] = crashed["index"] + WORKERS
            start(number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_gives_the_bits_of_the_cpu(dtype):
    results = list(slices(dtype))
    failures = {result["op"]: result["failure"] for result in results if "failure" in result}
    unexpected = {op: text for op, text in failures.items() if op not in REASONS}
    broken = [result for result in results if "generator" in result]
    assert not broken, broken
    assert not unexpected, json.dumps(unexpected, indent=1)
    assert len(results) > 500 and sum(result["tried"] for result in results) > 9000


def test_few_operators_are_excused_and_each_has_a_reason():
    assert len(REASONS) <= 12 and all(len(reason) > 20 for reason in REASONS.values())
