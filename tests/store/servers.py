"""Store servers on threads of this process, for tests."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from optimum_trn.store import Shelf, StoreServer

TOKEN = b"a token of these tests"


@contextlib.contextmanager
def running(server: StoreServer) -> Iterator[StoreServer]:
    """Serve on a thread until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def a_store(memory: int = 64 << 20, **options) -> StoreServer:
    return StoreServer(Shelf(memory), TOKEN, **options)
