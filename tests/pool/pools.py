"""Pools of stores on threads of this process, and small saved models, for tests."""

import contextlib
from collections.abc import Iterator

from optimum_trn.pool import Pool, PoolAddress
from tests.store.servers import TOKEN, a_store, running


@contextlib.contextmanager
def a_pool(stores: int = 4, **options) -> Iterator[Pool]:
    """A pool and its servers (`pool.servers`), until the end of the block."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(a_store(**options))) for _ in range(stores)]
        pool = Pool(PoolAddress(tuple((server.host, server.port) for server in servers), TOKEN), timeout=30)
        pool.servers = servers
        stack.enter_context(pool)
        yield pool
