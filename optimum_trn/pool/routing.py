"""Which core a request for a model goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

POLICIES = ("cache aware", "least loaded")
SLACK = 2  # requests by which a queue may be longer where the model is, or was last


class CoreCache:
    """The models that a core holds, or will hold when its queue is done, within a number of bytes; the last used last.

    The queue counts the request that runs, too.
    """

    def __init__(self, index: int, capacity: float) -> None:
        self.index = index
        self.capacity = capacity
        self.queue = 0
        self.resident: OrderedDict[str, float] = OrderedDict()

    def admit(self, model: str, size: float) -> list[str]:
        """Use a model: returns those that are evicted for it, the least recently used first.

        One that is larger than the capacity is alone.
        """
        self.resident.pop(model, None)
        evicted = []
        while self.resident and sum(self.resident.values()) + size > self.capacity:
            evicted.append(self.resident.popitem(last=False)[0])
        self.resident[model] = size
        return evicted


class Router:
    """Sends requests to cores by a policy, and keeps what each core holds.

    Cache aware (after the load balancer of DistMind, IEEE/ACM Transactions on Networking, 2024): of the cores that hold
    the model that of the shortest queue, else the core that evicted it last, else the one of the shortest queue; but
    never one whose queue is more than `SLACK` requests longer than the shortest, so that no core idles for a cache.
    """

    def __init__(self, cores: Sequence[CoreCache], policy: str = "cache aware") -> None:
        if policy not in POLICIES:
            raise ValueError(f"{policy!r} is no policy: take one of {', '.join(POLICIES)}.")
        self.cores = list(cores)
        self.policy = policy
        self._evicted_from: dict[str, CoreCache] = {}

    def route(self, model: str, size: float) -> tuple[CoreCache, bool, list[str]]:
        """The core for a request, which is in its queue from now on; whether it holds the model; what it evicts."""
        least = min(self.cores, key=lambda core: (core.queue, core.index))
        core = self._preferred(model, least) if self.policy == "cache aware" else least
        hit = model in core.resident
        evicted = core.admit(model, size)
        for other in evicted:
            self._evicted_from[other] = core
        core.queue += 1
        return core, hit, evicted

    def done(self, core: CoreCache) -> None:
        """A request has left the queue of a core."""
        core.queue -= 1

    def remove(self, core: CoreCache) -> None:
        """A core is gone, and what it held with it."""
        self.cores.remove(core)
        self._evicted_from = {model: last for model, last in self._evicted_from.items() if last is not core}

    def _preferred(self, model: str, least: CoreCache) -> CoreCache:
        holders = [core for core in self.cores if model in core.resident]
        if holders:
            core = min(holders, key=lambda core: (core.queue, core.index))
        else:
            core = self._evicted_from.get(model, least)
        return core if core.queue <= least.queue + SLACK else least
