"""A simulation of many cores that serve many models from a pool: throughput, hits, latency, utilisation. All simulated.

Servers of some cores share a link to the pool and have a cache of models in host memory; each core holds models in its
HBM. A request for a model that its core does not hold brings it over the link, unless the host has it, and over the
copy to the device, while its first layers run already; the loader of a core is one request ahead of its compute.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from .grouping import Layer, Stages, equal_groups, progress
from .routing import CoreCache, Router

GB = 1e9
MODELS = {  # bytes in float32, by the published numbers of parameters
    "ResNet-152": 4 * 60.2e6,
    "Inception-v3": 4 * 27.2e6,
    "DenseNet-201": 4 * 20.0e6,
    "BERT-base": 4 * 110e6,
    "GPT-2": 4 * 124e6,
}


@dataclass(frozen=True)
class Scenario:
    """What is simulated. Sizes in bytes, times in seconds, bandwidths in bytes per second."""

    cores: int = 16
    cores_per_server: int = 8
    models: int = 128
    zipf: float = 0.9
    core_cache: float = 2 * GB
    host_cache: float = 4.1 * GB
    stages: Stages = Stages(100e9 / 8, 12e9, 50e-6)
    compute: float = 30e-3
    """Of one request, a batch of 8, of whatever model."""
    groups: int = 16
    policy: str = "cache aware"
    outstanding: int = 4
    """Requests of each core that are always under way: saturation. Without arrivals."""
    arrivals: float | None = None
    """Requests per second of all cores, at random, instead of `outstanding`."""
    training_step: float | None = None
    """Of a training job that uses cores while they have no request, which wait for its step; None: no training."""
    training_switch: float = 10e-3
    """To get a training job out of the way and back."""
    requests: int = 20_000
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it, all simulated: requests per second, shares of 1, and seconds."""

    throughput: float
    hit_rate: float
    host_hit_rate: float
    utilisation: float
    training: float
    p50: float
    p99: float


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario; the first tenth of the requests warms the caches and is not counted."""
    return _Simulation(scenario).run()


@dataclass
class _Request:
    model: str
    size: float
    hit: bool
    arrived: float
    started: simpy.Event  # its first group is on the core
    loaded: simpy.Event


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.environment = simpy.Environment()
        self.random = random.Random(scenario.seed)
        sizes = list(MODELS.values())
        self.sizes = {f"{index}": sizes[index % len(sizes)] for index in range(scenario.models)}
        weights = [1 / (rank + 1) ** scenario.zipf for rank in range(scenario.models)]
        self.cumulative = list(itertools.accumulate(weights))
        self.names = list(self.sizes)
        self.random.shuffle(self.names)
        self.router = Router([CoreCache(i, scenario.core_cache) for i in range(scenario.cores)], scenario.policy)
        servers = -(-scenario.cores // scenario.cores_per_server)
        self.links = [simpy.Resource(self.environment) for _ in range(servers)]
        self.hosts = [CoreCache(index, scenario.host_cache) for index in range(servers)]
        self.loaders = [simpy.Store(self.environment) for _ in range(scenario.cores)]
        self.queues = [simpy.Store(self.environment, capacity=1) for _ in range(scenario.cores)]
        self.busy = [0.0] * scenario.cores
        self.trained = [0.0] * scenario.cores
        self.since: list[float | None] = [None] * scenario.cores  # when the request began that runs
        self.latencies: list[float] = []
        self.hits = self.host_hits = self.misses = self.completed = 0
        self.warm = scenario.requests // 10
        self.warm_at = 0.0
        self.finished = self.environment.event()

    def run(self) -> Outcome:
        for index in range(self.scenario.cores):
            self.environment.process(self._load(index))
            self.environment.process(self._compute(index))
        if self.scenario.arrivals is None:
            for _ in range(self.scenario.outstanding * self.scenario.cores):
                self._submit()
        else:
            self.environment.process(self._arrive(self.scenario.arrivals))
        self.environment.run(until=self.finished)
        for index, since in enumerate(self.since):  # what runs as the last request ends
            if since is not None:
                self.busy[index] += min(self.scenario.compute, self.environment.now - max(since, self.warm_at))
        elapsed, cores = self.environment.now - self.warm_at, self.scenario.cores
        ordered = sorted(self.latencies)
        counted = max(1, self.hits + self.misses)
        return Outcome(
            throughput=len(ordered) / elapsed,
            hit_rate=self.hits / counted,
            host_hit_rate=self.host_hits / max(1, self.misses),
            utilisation=sum(self.busy) / elapsed / cores,
            training=sum(self.trained) / elapsed / cores,
            p50=ordered[len(ordered) // 2],
            p99=ordered[int(len(ordered) * 0.99)],
        )

    def _arrive(self, rate: float) -> Generator[Any, Any, None]:
        while True:
            yield self.environment.timeout(self.random.expovariate(rate))
            self._submit()

    def _submit(self) -> None:
        name = self.random.choices(self.names, cum_weights=self.cumulative)[0]
        core, hit, _ = self.router.route(name, self.sizes[name])
        if self.completed >= self.warm:
            self.hits += hit
            self.misses += not hit
        events = (self.environment.event(), self.environment.event())
        self.loaders[core.index].put(_Request(name, self.sizes[name], hit, self.environment.now, *events))

    def _load(self, index: int) -> Generator[Any, Any, None]:
        """The loader of a core: at most one request further than the compute."""
        server = index // self.scenario.cores_per_server
        stages, groups = self.scenario.stages, self.scenario.groups
        while True:
            request = yield self.loaders[index].get()
            yield self.queues[index].put(request)
            if not request.hit:
                host = self.hosts[server]
                in_host = request.model in host.resident
                host.admit(request.model, request.size)
                if self.completed >= self.warm:
                    self.host_hits += in_host
                first = Layer(request.size / groups, 0.0)
                if in_host:
                    copy = progress(equal_groups(Layer(request.size, 0.0), groups), _copy_only(stages)).copy
                    yield self.environment.timeout(copy / groups)
                    request.started.succeed()
                    yield self.environment.timeout(copy - copy / groups)
                else:
                    whole = progress(equal_groups(Layer(request.size, 0.0), groups), stages)
                    with self.links[server].request() as link:
                        yield link
                        alone = progress([first], stages).copy
                        yield self.environment.timeout(alone)
                        request.started.succeed()
                        yield self.environment.timeout(max(0.0, whole.network - alone))
                    yield self.environment.timeout(whole.copy - whole.network)
            else:
                request.started.succeed()
            request.loaded.succeed()

    def _compute(self, index: int) -> Generator[Any, Any, None]:
        scenario, environment = self.scenario, self.environment
        last = scenario.compute / scenario.groups
        while True:
            if scenario.training_step is not None and not self.queues[index].items:
                yield from self._train(index)
            request = yield self.queues[index].get()
            yield request.started
            self.since[index] = environment.now
            yield environment.timeout(scenario.compute - last)
            yield request.loaded  # the last layers wait for the last group
            yield environment.timeout(last)
            self._complete(index, request)

    def _train(self, index: int) -> Generator[Any, Any, None]:
        """Steps of the training job until a request waits; each is done before the request runs."""
        step, switch = self.scenario.training_step, self.scenario.training_switch
        assert step is not None
        yield self.environment.timeout(switch)
        while not self.queues[index].items:
            yield self.environment.timeout(step)
            if self.completed >= self.warm:
                self.trained[index] += step
        yield self.environment.timeout(switch)

    def _complete(self, index: int, request: _Request) -> None:
        self.completed += 1
        self.since[index] = None
        self.router.done(self.router.cores[index])
        if self.completed == self.warm:
            self.warm_at = self.environment.now
        elif self.completed > self.warm:
            self.busy[index] += min(self.scenario.compute, self.environment.now - self.warm_at)
            self.latencies.append(self.environment.now - request.arrived)
        if self.completed == self.scenario.requests:
            self.finished.succeed()
        elif self.scenario.arrivals is None:
            self._submit()


def _copy_only(stages: Stages) -> Stages:
    return Stages(float("inf"), stages.copy_bandwidth, 0.0, stages.copy_latency)


def host_memory(models: int) -> float:
    """Bytes that hold all models in the memory of one server, as systems do that have no pool."""
    sizes = list(MODELS.values())
    return sum(sizes[index % len(sizes)] for index in range(models))
