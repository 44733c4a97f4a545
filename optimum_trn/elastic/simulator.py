"""Simulates a training job on nodes that fail: how much of the time becomes progress, and where the rest goes.

Everything that comes out of it is simulated, nothing measured.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from optimum_trn.elastic.failure_clock import FailureClock
from optimum_trn.elastic.policies import Policy, Tier

BUCKETS = ("effective", "redundant", "lost", "checkpoint", "recovery", "idle")


@dataclass(frozen=True)
class Job:
    """What is trained: seconds of a step of `samples` samples on so many nodes, and the fewest that it runs on."""

    name: str
    samples: float
    step_seconds: Callable[[int], float]
    nodes: int
    minimum_nodes: int = 1


@dataclass
class Outcome:
    """Seconds by bucket, and what was reached in them; all of it simulated.

    "effective" trained steps that stayed; "lost" trained steps that were done again, and steps and checkpoints that a
    failure cut short; "idle" is time without enough nodes.
    """

    policy: str
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    samples: float = 0.0
    failures: int = 0
    tiers: dict[str, int] = field(default_factory=lambda: {tier.value: 0 for tier in Tier})
    progress: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, samples) at every failure and at the end."""

    @property
    def total(self) -> float:
        """Seconds of the whole simulation."""
        return sum(self.seconds.values())

    def share(self, bucket: str) -> float:
        """The part of the time that went into a bucket."""
        return self.seconds[bucket] / self.total if self.total else 0.0

    @property
    def goodput(self) -> float:
        """Samples a second that stayed."""
        return self.samples / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `simulated` says what these figures are."""
        return {
            "simulated": True,
            "policy": self.policy,
            "goodput": self.goodput,
            "shares": {bucket: self.share(bucket) for bucket in BUCKETS},
            "failures": self.failures,
            "recovered_from": self.tiers,
            "progress": self.progress,
        }


def simulate(
    job: Job,
    policy: Policy,
    clock: FailureClock,
    *,
    until: float | None = None,
    until_nodes: int = 0,
    replacement_seconds: float | None = None,
    seed: int = 0,
) -> Outcome:
    """Run a job until `until` seconds, or until a failure would leave fewer nodes than `until_nodes`.

    Lost nodes come back after `replacement_seconds`, if given, or when the clock says so. `seed` draws which fail.
    """
    if until is None and (not until_nodes or replacement_seconds is not None):
        raise ValueError("A simulation needs an end: a time, or a number of nodes and no replacements.")
    environment = simpy.Environment()
    run = _Run(environment, job, policy, until_nodes, replacement_seconds, random.Random(seed))
    environment.process(run.fail(clock))
    environment.run(until=run.over if until is None else environment.any_of([run.over, environment.timeout(until)]))
    run.close()
    return run.outcome


class _Run:
    """One simulation: a process that trains, and one that interrupts it."""

    def __init__(
        self,
        environment: simpy.Environment,
        job: Job,
        policy: Policy,
        until_nodes: int,
        replacement_seconds: float | None,
        draw: random.Random,
    ) -> None:
        self.environment = environment
        self.job = job
        self.policy = policy
        self.until_nodes = until_nodes
        self.replacement_seconds = replacement_seconds
        self.draw = draw
        self.outcome = Outcome(policy.name)
        self.over = environment.event()
        self.nodes = job.nodes
        self.missing = 0  # nodes whose replacement is on its way, for policies that wait for it
        self.down: frozenset[int] = frozenset()  # failed before the last recovery was complete
        self.steps: list[tuple[float, float]] = []  # training and redundant seconds of what the checkpoints do not hold
        self.since = {Tier.MEMORY: 0, Tier.PERSISTENT: 0}  # steps since the last checkpoint of each kind
        self.recovering: float = 0.0  # seconds that are still to be spent on recovery
        self.saves_next = False
        self.activity, self.began = "idle", 0.0
        self.training = environment.process(self.train())

    def train(self) -> Generator[Any, Any, None]:
        """Steps, checkpoints and recoveries, until the simulation ends."""
        while True:
            try:
                if self.nodes < self.job.minimum_nodes or (self.policy.waits_for_nodes and self.missing):
                    yield from self._spend("idle", None)
                elif self.recovering:
                    yield from self._spend("recovery", self.recovering)
                    self.recovering = 0.0
                    self.down = frozenset()
                else:
                    yield from self._step()
            except simpy.Interrupt:
                pass

    def _step(self) -> Generator[Any, Any, None]:
        train = self.job.step_seconds(self.nodes)
        redundant = train * self.policy.slowdown()
        yield from self._spend("lost", train + redundant)  # until it is known to stay
        self.outcome.seconds["lost"] -= train + redundant
        self.outcome.seconds["effective"] += train
        self.outcome.seconds["redundant"] += redundant
        self.outcome.samples += self.job.samples
        self.steps.append((train, redundant))
        self.since = {tier: count + 1 for tier, count in self.since.items()}
        if self.policy.memory_steps and self.since[Tier.MEMORY] >= self.policy.memory_steps:
            self.since[Tier.MEMORY] = 0
        if self.since[Tier.PERSISTENT] >= self.policy.checkpoint_steps or self.saves_next:
            if self.policy.pause():
                yield from self._spend("checkpoint", self.policy.pause())
            self.since[Tier.PERSISTENT], self.saves_next = 0, False
            del self.steps[:]

    def _spend(self, bucket: str, seconds: float | None) -> Generator[Any, Any, None]:
        """Wait that long, or for an interrupt, and book the time."""
        self.activity, self.began = bucket, self.environment.now
        try:
            yield self.environment.event() if seconds is None else self.environment.timeout(seconds)
        finally:
            self._book()

    def _book(self) -> None:
        self.outcome.seconds[self.activity] += self.environment.now - self.began
        self.began = self.environment.now

    def fail(self, clock: FailureClock) -> Generator[Any, Any, None]:
        """Remove and add nodes when the clock says so."""
        for event in clock.events():
            yield self.environment.timeout(max(0.0, event.seconds - self.environment.now))
            if event.change > 0:
                self._add(event.change)
                continue
            lost = min(-event.change, self.nodes)
            self.outcome.progress.append((self.environment.now, self.outcome.samples))
            if self.nodes - lost < self.until_nodes:
                self.over.succeed()
                return
            if lost:
                self._lose(lost)
        if not self.over.triggered and self.until_nodes:
            self.over.succeed()

    def _lose(self, count: int) -> None:
        nodes = self.nodes + len(self.down)  # those that are down have their places, and the copies of others, still
        lost = frozenset(self.draw.sample(sorted(set(range(nodes)) - self.down), count))
        recovery = self.policy.recover(nodes, lost, self.down)
        self.outcome.failures += 1
        self.outcome.tiers[recovery.tier.value] += 1
        self.saves_next |= self.policy.saves_after_restart
        if recovery.tier is not Tier.STEP:
            self._roll_back(self.since[recovery.tier])
        self.nodes -= count
        self.down |= lost
        self.recovering = max(self.recovering, recovery.seconds)
        if self.replacement_seconds is not None:
            self.missing += count
            self.environment.process(self._replace(count, self.replacement_seconds))
        self.training.interrupt()

    def _roll_back(self, count: int) -> None:
        """Steps that are to be done again were not effective."""
        for train, redundant in self.steps[len(self.steps) - count :]:
            self.outcome.seconds["effective"] -= train
            self.outcome.seconds["redundant"] -= redundant
            self.outcome.seconds["lost"] += train + redundant
            self.outcome.samples -= self.job.samples
        del self.steps[len(self.steps) - count :]
        self.since[Tier.PERSISTENT] -= count
        self.since[Tier.MEMORY] = 0

    def _replace(self, count: int, seconds: float) -> Generator[Any, Any, None]:
        yield self.environment.timeout(seconds)
        self.missing -= count
        self._add(count)

    def _add(self, count: int) -> None:
        self.nodes = min(self.nodes + count, self.job.nodes)
        self.recovering = max(self.recovering, self.policy.join(self.nodes))
        self.training.interrupt()

    def close(self) -> None:
        """Book what is under way."""
        self._book()
        self.outcome.progress.append((self.environment.now, self.outcome.samples))


def throughput_table(samples: float, by_nodes: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a step from measured samples a second by nodes; between and beyond them, those of the next fewer."""
    known = sorted(by_nodes)

    def step_seconds(nodes: int) -> float:
        place = max(bisect.bisect_right(known, nodes) - 1, 0)
        return samples / by_nodes[known[place]]

    return step_seconds
