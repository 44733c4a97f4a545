"""Runs a test function on several ranks, on one session-wide pool of worker processes that import once.

    def losses(rank, world_size, steps):            # a module-level function of a test module
        ...                                         # the default process group is initialised here
        return [0.1, 0.2]

    def test_losses():
        per_rank = run_ranks(losses, 2, 5)          # on simulated NeuronCores
        per_rank = run_ranks(losses, 2, 5, device="cpu")   # on gloo, without the simulator

`losses` is called as `losses(rank, world_size, *args, **kwargs)`. Return values are pickled, so return CPU tensors.
A rank that raises fails the test with every rank's traceback; a rank that hangs or dies fails it too, and the pool is
killed and rebuilt. Tests about dying name the ranks that may die in `may_die`; those ranks return None.
"""

import atexit
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0  # importing torch and transformers, and on a fresh machine compiling the device extension
GRACE_SECONDS = 10.0  # how long the other ranks get to report after the first failure


class RankError(AssertionError):
    """At least one rank raised, hung or died; the text holds what every rank said."""


class Worker:
    """One worker process, pinned to one local rank for its whole life."""

    def __init__(self, local_rank: int, device: str, directory: Path):
        self.local_rank = local_rank
        self.log = directory / f"{device}-{local_rank}.log"
        address = str(directory / f"{device}-{local_rank}-{time.monotonic_ns()}.sock")
        listener = Listener(address, family="AF_UNIX")
        environment = {
            **os.environ,
            "LOCAL_RANK": str(local_rank),
            "OMP_NUM_THREADS": "1",
            "OPTIMUM_TRN_DEVICE": device,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker", address], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )
        listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        self.connection: Connection = listener.accept()
        listener.close()

    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self, characters: int = 3000) -> str:
        text = self.log.read_text(errors="replace")
        return text[-characters:]

    def stacks(self) -> None:
        if self.alive():
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """Worker processes of one device type, grown on demand and rebuilt after a failure."""

    def __init__(self, device: str):
        self.device = device
        self.directory = Path(tempfile.mkdtemp(prefix="optimum-trn-pool-"))
        self.workers: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        if not all(worker.alive() for worker in self.workers):
            self.kill()
        while len(self.workers) < count:
            self.workers.append(Worker(len(self.workers), self.device, self.directory))
        return self.workers[:count]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []


_pools: dict[str, Pool] = {}


@atexit.register
def kill_pools() -> None:
    """End every worker process."""
    for pool in _pools.values():
        pool.kill()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "neuron",
    timeout: float = 120.0,
    environment: dict[str, str] | None = None,
    may_die: Iterable[int] = (),
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, world_size, *args, **kwargs)` on `world_size` ranks and return their results in rank order.

    Raises RankError with every rank's traceback, or the tail of its output and its stack where it hung or died.
    """
    pool = _pools.setdefault(device, Pool(device))
    workers = pool.take(world_size)
    may_die = set(may_die)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, worker in enumerate(workers):
        job = {
            "module": function.__module__,
            "function": function.__qualname__,
            "args": args,
            "kwargs": kwargs,
            "rank": rank,
            "world_size": world_size,
            "port": store.port,
            "timeout": timeout,
            "environment": environment or {},
        }
        worker.connection.send_bytes(pickle.dumps(job))

    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[arg-type]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                code = workers[rank].process.wait()
                if rank in may_die:
                    results[rank] = None
                    continue
                succeeded, value = False, f"the process ended with code {code}; its output:\n{workers[rank].said()}"
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    for rank in pending.values():
        workers[rank].stacks()
    if pending:
        wait(list(pending), timeout=1.0)  # gives faulthandler the time to write
    for rank in pending.values():
        failures.setdefault(rank, f"no answer in time; its output:\n{workers[rank].said(6000)}")
    if pending or failures or not all(worker.alive() for worker in workers):
        pool.kill()
    else:
        for worker in workers:
            worker.connection.send_bytes(b"all have answered")
    if failures:
        raise RankError("\n".join(f"--- rank {rank} of {world_size}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(world_size)]


def resolve(module: str, qualified_name: str) -> Callable[..., Any]:
    """The function that a job names; raises AttributeError where it is not at module level."""
    target: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        target = getattr(target, part)
    function: Callable[..., Any] = target
    return function
