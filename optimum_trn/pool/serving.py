"""Spreads requests for many models over few cores: to where a model is resident, in order, and none is lost."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from ..errors import StoreError
from ..store.client import StoreClient
from ..store.protocol import Operation
from .address import default_path
from .routing import CoreCache, Router


@dataclass
class ModelMetrics:
    """Of the requests for one model that are answered, in seconds."""

    requests: int = 0
    hits: int = 0
    waited: float = 0.0
    longest: float = 0.0


@dataclass
class _Request:
    number: int
    model: str
    inputs: bytes
    result: Future[torch.Tensor]
    begin: float


class Dispatcher:
    """Sends each request to a worker (host, port) by `Router`, at most one at a time to each, in the order they came.

    `capacity` is how many models a worker keeps.  If a worker is gone, its requests go to the others.  `order` holds
    the numbers of the requests by worker as they were answered; `metrics` what each model's requests took.
    """

    def __init__(self, workers: Sequence[tuple[str, int]], token: bytes, capacity: int, timeout: float = 120.0) -> None:
        self.order: list[list[int]] = [[] for _ in workers]
        self.metrics: dict[str, ModelMetrics] = {}
        self._router = Router([CoreCache(index, capacity) for index in range(len(workers))])
        self._lock = threading.Lock()
        self._numbers = 0
        self._open: set[Future[torch.Tensor]] = set()
        self._queues: list[queue.SimpleQueue[_Request | None]] = [queue.SimpleQueue() for _ in workers]
        self._threads = [
            threading.Thread(target=self._work, args=(index, StoreClient(host, port, token, timeout)), daemon=True)
            for index, (host, port) in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, model: str, **inputs: torch.Tensor) -> Future[torch.Tensor]:
        """The logits of a causal language model of the pool for inputs, when they are there."""
        data = save({name: value.contiguous() for name, value in inputs.items()})
        with self._lock:
            self._numbers += 1
            request = _Request(self._numbers - 1, model, data, Future(), time.perf_counter())
            self._open.add(request.result)
            request.result.add_done_callback(self._open.discard)
            self._send(request)
        return request.result

    def close(self) -> None:
        """End the threads, after what was submitted."""
        wait(list(self._open))
        for one in self._queues:
            one.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, request: _Request) -> None:
        if not self._router.cores:
            request.result.set_exception(StoreError("No worker is left: all that were given have ended."))
            return
        core, _, _ = self._router.route(request.model, 1)
        self._queues[core.index].put(request)

    def _work(self, index: int, client: StoreClient) -> None:
        core = next(core for core in self._router.cores if core.index == index)
        gone = False
        while (request := self._queues[index].get()) is not None:
            if gone:  # was sent before it was known
                with self._lock:
                    self._send(request)
                continue
            try:
                took, data = client.exchange(Operation.INFER, {"model": request.model}, memoryview(request.inputs))
                self._answered(index, core, request, bool(took["hit"]))
                request.result.set_result(load(bytes(data))["logits"])
            except StoreError as error:
                with self._lock:
                    self._router.done(core)
                request.result.set_exception(error)
            except OSError:
                gone = True
                with self._lock:
                    self._router.remove(core)
                    self._send(request)
        client.close()

    def _answered(self, index: int, core: CoreCache, request: _Request, hit: bool) -> None:
        seconds = time.perf_counter() - request.begin
        with self._lock:
            self._router.done(core)
            self.order[index].append(request.number)
            metrics = self.metrics.setdefault(request.model, ModelMetrics())
            metrics.requests += 1
            metrics.hits += hit
            metrics.waited += seconds
            metrics.longest = max(metrics.longest, seconds)


@contextmanager
def worker_processes(count: int, capacity: int, **environment: str) -> Iterator[list[tuple[tuple[str, int], Any]]]:
    """Workers of the pool of OPTIMUM_TRN_POOL, one for each core: ((host, port), process), until the end."""
    with ExitStack() as stack:
        processes = []
        for index in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "optimum_trn.pool.worker", str(capacity)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OPTIMUM_TRN_POOL": str(default_path()),
                    "NEURON_RT_VISIBLE_CORES": str(index),
                    **environment,
                },
            )
            stack.callback(_end, process)
            processes.append(process)
        yield [(("127.0.0.1", _port(process)), process) for process in processes]


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise StoreError("A worker ended as it started; it has printed why.")
    return int(line)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
