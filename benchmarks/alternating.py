"""Contenders that take turns in one run: while one does its steps, the others wait for a line on a pipe.

What slows the machine down for a while slows both sides of a ratio, which is that of neighbouring turns.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender

ROOT = Path(__file__).resolve().parent.parent
PARALLEL = 1.85
"""A product on 2 threads has to be this many times as fast as on one, or something else runs on the cores."""
PATIENCE = 240.0
"""Seconds that a turn may take."""


@dataclass(frozen=True)
class Ratio:
    """How many times as long one takes as another: the median over neighbouring turns, and its quartiles."""

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return Ratio(median, lower, upper)


def parallel_speed() -> float:
    """How many times as fast 2 threads are as one in a product of matrices; the best of five each."""
    matrix = torch.randn(1536, 1536)
    best = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = []
        for _ in range(6):
            started = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - started)
        best[threads] = min(times[1:])
    torch.set_num_threads(1)
    return best[1] / best[2]


class Running:
    """The processes of one contender; they end with the context."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.processes: list[subprocess.Popen[str]] = []
        self.replies: list[Any] = []
        self.output = tempfile.TemporaryFile("w+")
        self.store: dist.TCPStore | None = None

    def __enter__(self) -> Running:
        ranks = self.contender.ranks
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(ranks):
            reader, writer = os.pipe()
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(self.contender.threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HARNESS_REPLIES": str(writer),
                **self.contender.environment,
            }
            if ranks > 1:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "benchmarks" / "contenders.py"), self.contender.text()],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=self.output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    pass_fds=(writer,),
                )
            )
            os.close(writer)
            self.replies.append(os.fdopen(reader))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)  # they wait for a line, and hold nothing
        for process in self.processes:
            process.wait()
        for reply in self.replies:
            reply.close()
        self.output.close()

    def turn(self, steps: int) -> dict[str, Any]:
        """Do `steps` steps; what the slowest rank says, with the mean `seconds` of a step."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [self._answer(number) for number in range(len(self.processes))]
        slowest: dict[str, Any] = max(answers, key=lambda answer: answer["seconds"])
        peak = max(answer.get("peak", 0) for answer in answers)
        # Data-parallel ranks have a loss each.
        means = {key: statistics.fmean(answer[key] for answer in answers) for key in ("loss", "first")}
        return {**slowest, **means, "seconds": slowest["seconds"] / steps, "peak": peak}

    def _answer(self, number: int) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies[number], selectors.EVENT_READ)
            line = self.replies[number].readline() if selector.select(PATIENCE) else ""
        if not line:
            self.output.seek(0)
            raise RuntimeError(f"{self.contender} ended or hung; its output ends with\n{self.output.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def alternate(
    contenders: Mapping[str, Contender], turns: int, steps: int = 1, warm_up: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """All contenders in turns of `steps` steps; what each said in each turn but the first `warm_up` ones."""
    running: dict[str, Running] = {}
    said: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    try:
        for name, contender in contenders.items():  # one after the other, or their start-up would be slow
            running[name] = Running(contender).__enter__()
            running[name].turn(1)
        for turn in range(turns + warm_up):
            names = list(contenders) if turn % 2 else list(contenders)[::-1]
            for name in names:
                answer = running[name].turn(steps)
                if turn >= warm_up:
                    said[name].append(answer)
    finally:
        for process in running.values():
            process.__exit__(None, None, None)
    return said
