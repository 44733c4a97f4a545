"""The agent of a node: a process of its own that holds memory checkpoints and outlives the workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from optimum_trn.store import Shelf, StoreServer


def serve(memory: int, token: bytes, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Hold up to `memory` bytes until SIGTERM or Ctrl-C; `ready` is told host:port when the agent listens.

    Its memory is that of an ordinary process: killing the workers leaves it, killing the agent, or its node, ends it.
    """
    asyncio.run(_serve(StoreServer(Shelf(memory), token, host=host, port=port), ready))


async def _serve(server: StoreServer, ready: Callable[[str], None]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with server:
        ready(f"{server.host}:{server.port}")
        await stopped.wait()
