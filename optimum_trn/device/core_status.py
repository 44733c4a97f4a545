"""What a running core shows to other processes (`optimum-trn top`, `ls`, `monitor`): one small file for each of them.

A file is written at most twice a second, when a step ends, and removed when its process ends; files of processes that
died are removed by whoever looks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimum_trn.device.step_graphs import StepGraphs

INTERVAL = 0.5


@dataclass(frozen=True)
class CoreStatus:
    """One process and its simulated core, in bytes, seconds and per cent.

    `utilization` is the part of the time since the last status that the process computed on the host, which simulates
    the core: it says whether a job waits, not how fast the hardware would be. `loss` is the last one that a Trainer
    logged.
    """

    pid: int
    command: str
    instance: str
    logical_core_size: int
    core: int
    rank: int
    started: float
    updated: float
    step: int
    step_seconds: float | None
    loss: float | None
    utilization: float
    tensor_bytes: int
    scratch_bytes: int
    peak_bytes: int
    limit_bytes: int
    host_bytes: int
    graphs: int
    cache_hits: int
    graph_breaks: int


def directory() -> Path:
    """Where the statuses of this user's processes lie."""
    return Path(tempfile.gettempdir(), f"optimum_trn-{os.getuid()}", "cores")


class Reporter:
    """Writes the status of this process while it trains."""

    def __init__(self, graphs: StepGraphs, instance: str, logical_core_size: int, core: int, device: int):
        self.graphs, self.instance, self.logical_core_size = graphs, instance, logical_core_size
        self.core, self.device = core, device
        self.started = time.time()
        self.loss: float | None = None
        self.file = directory() / f"{os.getpid()}.json"
        self._last: tuple[float, float, int] = (time.monotonic(), time.process_time(), graphs.steps)
        self._written = False
        graphs.on_step.append(self.step_ended)

    def step_ended(self) -> None:
        """Called after every step: write, unless the last time was a moment ago."""
        if time.monotonic() - self._last[0] >= INTERVAL or not self._written:
            self.write()

    def write(self) -> None:
        """Write the status now; a full disk or a directory that isn't ours must not end a training run."""
        now, cpu, step = time.monotonic(), time.process_time(), self.graphs.steps
        elapsed, steps = max(now - self._last[0], 1e-9), step - self._last[2]
        used = (cpu - self._last[1]) / elapsed / torch.get_num_threads()
        self._last = (now, cpu, step)
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.file.with_suffix(".new")
            unfinished.write_text(json.dumps(asdict(self._status(elapsed, steps, min(100.0, 100 * used)))))
            unfinished.replace(self.file)
            if not self._written:
                self._written = True
                atexit.register(self.remove, os.getpid())

    def _status(self, elapsed: float, steps: int, utilization: float) -> CoreStatus:
        from optimum_trn.device.build import load_extension

        memory = load_extension().arena_stats(self.device)
        graphs = self.graphs
        return CoreStatus(
            pid=os.getpid(),
            command=" ".join(sys.argv),
            instance=self.instance,
            logical_core_size=self.logical_core_size,
            core=self.core,
            rank=int(os.environ.get("RANK", 0)),
            started=self.started,
            updated=time.time(),
            step=graphs.steps,
            step_seconds=elapsed / steps if steps else None,
            loss=self.loss,
            utilization=utilization,
            tensor_bytes=memory.get("tensor_bytes", 0),
            scratch_bytes=memory.get("scratch_bytes", 0),
            peak_bytes=memory.get("tensor_peak", 0),
            limit_bytes=memory.get("limit", 0),
            host_bytes=_resident_bytes(),
            graphs=graphs.graphs,
            cache_hits=graphs.cache_hits,
            graph_breaks=graphs.graph_breaks,
        )

    def remove(self, pid: int) -> None:
        """At the end of process `pid`, which a forked child is not."""
        if os.getpid() == pid:
            self.file.unlink(missing_ok=True)


_reporter: Reporter | None = None


def start(graphs: StepGraphs, instance: str, logical_core_size: int, core: int, device: int) -> None:
    """Show this process to others from its first step on; called once, when its core is chosen."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter(graphs, instance, logical_core_size, core, device)


def show_loss(loss: float) -> None:
    """A loss that has been computed anyway, for the status."""
    if _reporter is not None:
        _reporter.loss = loss


def running_cores() -> list[CoreStatus]:
    """The statuses of this user's live processes on this host, by core and rank."""
    found = []
    for file in directory().glob("*.json") if directory().is_dir() else ():
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is being removed, or of another version
            status = CoreStatus(**json.loads(file.read_text()))
            if _is_alive(status):
                found.append(status)
            else:
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda status: (status.instance, status.core, status.rank))


def _is_alive(status: CoreStatus) -> bool:
    try:
        return Path(f"/proc/{status.pid}").stat().st_mtime <= status.updated + 1
    except OSError:
        return False


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
