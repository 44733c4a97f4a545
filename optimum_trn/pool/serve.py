"""Runs the stores of a pool, each in a process of its own, until they are told to stop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..store import Shelf, StoreServer
from ..store.frames import FrameServer
from .address import PoolAddress

START_SECONDS = 60.0


class PoolProcesses:
    """The processes of a pool: `with` it, or `close()`.  They end with the process that started them.

    `memory` bytes for each store; beyond them chunks go to disk below `spill`, or are forgotten where that is allowed.
    `rate` emulates links of that many bytes per second.
    """

    def __init__(
        self,
        stores: int,
        memory: int,
        host: str = "127.0.0.1",
        spill: Path | None = None,
        rate: float | None = None,
        cores: int = 0,
    ) -> None:
        if stores < 1:
            raise StoreError(f"A pool of {stores} stores keeps nothing: give at least one.")
        token = secrets.token_bytes(32)
        self._processes: list[Any] = []
        self._control: list[Connection] = []
        try:
            addresses = [
                self._start(serve_store, token, host, memory, str(spill) if spill else None, rate)
                for _ in range(stores)
            ]
            scheduler = self._start(serve_leases, token, host, cores) if cores else None
        except BaseException:
            self.close()
            raise
        self.address = PoolAddress(tuple(addresses), token, scheduler)

    @property
    def pids(self) -> list[int]:
        """The processes of the stores, in their order."""
        return [process.pid for process in self._processes[: len(self.address.stores)]]

    def _start(self, serve: Callable[..., None], *arguments: Any) -> tuple[str, int]:
        # A fork has the package imported; nothing has used the device or started threads when a pool is started.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._control.append(ours)
        if not ours.poll(START_SECONDS):
            raise StoreError("A process of the pool does not start.")
        try:
            answer = ours.recv_bytes().decode()
        except EOFError:
            raise StoreError("A process of the pool ended as it started; it has printed why.") from None
        host, _, port = answer.rpartition(":")
        return host, int(port)

    def wait(self) -> None:
        """Until one of the processes ends."""
        wait([process.sentinel for process in self._processes])

    def close(self) -> None:
        """End all processes."""
        for control in self._control:
            control.close()  # which is what they wait for
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> PoolProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_store(
    control: Connection, token: bytes, host: str, memory: int, spill: str | None, rate: float | None
) -> None:
    """The life of one store process: until `control` is closed at the other end."""
    with tempfile.TemporaryDirectory(prefix="store-", dir=spill) as directory:
        serve_until_closed(
            control, StoreServer(Shelf(memory, Path(directory) if spill else None), token, host=host, rate=rate)
        )


def serve_leases(control: Connection, token: bytes, host: str, cores: int) -> None:
    """The life of the process that lends cores: until `control` is closed at the other end."""
    from .lease_server import LeaseServer

    serve_until_closed(control, LeaseServer(cores, token, host=host))


def serve_until_closed(control: Connection, server: FrameServer) -> None:
    """Serve, say on `control` where, and end when the process at its other end closes it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent tells when to stop
    os.setsid()

    async def run() -> None:
        async with server:
            control.send_bytes(f"{server.host}:{server.port}".encode())
            closed = asyncio.Event()
            asyncio.get_running_loop().add_reader(control.fileno(), closed.set)
            await closed.wait()
            asyncio.get_running_loop().remove_reader(control.fileno())

    asyncio.run(run())
