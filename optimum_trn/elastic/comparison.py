"""Designs side by side at many failure periods: each baseline at a given and at its best checkpoint interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from optimum_trn.elastic.failure_clock import FailureClock
from optimum_trn.elastic.intervals import daly_interval
from optimum_trn.elastic.policies import Policy
from optimum_trn.elastic.simulator import Job, Outcome

Run = Callable[[Policy, FailureClock], Outcome]
Baseline = Callable[[int], Policy]
"""A baseline by the number of steps between its checkpoints."""

FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Around Daly's interval, which knows nothing of whole steps and of failures that are not random."""
CLOSE = 0.01
"""Below this share of goodput a difference is called none."""


@dataclass(frozen=True)
class Best:
    """A baseline at its best interval: steps between checkpoints, Daly's steps, and what comes of it."""

    steps: int
    daly_steps: int
    outcome: Outcome


def best_interval(job: Job, baseline: Baseline, clock: FailureClock, run: Run, given: int) -> Best:
    """The best of the intervals around Daly's, and of the given one, by simulation."""
    step = job.step_seconds(job.nodes)
    daly = max(1, round(daly_interval(max(baseline(1).pause(), 1e-3), clock.period) / step))
    tried = sorted({given, *(max(1, round(daly * factor)) for factor in FACTORS)})
    outcomes = {steps: run(baseline(steps), clock) for steps in tried}
    best = max(tried, key=lambda steps: outcomes[steps].goodput)
    return Best(best, daly, outcomes[best])


@dataclass(frozen=True)
class Row:
    """One failure period: this design, and by name the baselines at the given interval and at their best one."""

    period: float
    ours: Outcome
    given: Mapping[str, Outcome]
    best: Mapping[str, Best]

    @property
    def ranking(self) -> list[str]:
        """The designs by goodput, the given intervals."""
        outcomes = [self.ours, *self.given.values()]
        return [outcome.policy for outcome in sorted(outcomes, key=lambda outcome: -outcome.goodput)]


def compare(
    job: Job, ours: Policy, baselines: Sequence[Baseline], given: int, clocks: Iterable[FailureClock], run: Run
) -> list[Row]:
    """A row for every clock."""
    rows = []
    for clock in clocks:
        outcomes = {(policy := make(given)).name: run(policy, clock) for make in baselines}
        best = {make(1).name: best_interval(job, make, clock, run, given) for make in baselines}
        rows.append(Row(clock.period, run(ours, clock), outcomes, best))
    return rows


def crossover(rows: Sequence[Row], name: str) -> tuple[float | None, float | None]:
    """From which of the periods on a baseline, at its best interval, is within 1 % of this design, and ahead of it.

    None: at none of them. It has to stay so at all longer periods.
    """
    close = ahead = None
    for row in sorted(rows, key=lambda row: -row.period):
        ratio = row.best[name].outcome.goodput / row.ours.goodput if row.ours.goodput else 0.0
        if ratio < 1 - CLOSE:
            break
        close = row.period
        if ratio > 1 and (ahead is not None or row is max(rows, key=lambda row: row.period)):
            ahead = row.period
    return close, ahead
