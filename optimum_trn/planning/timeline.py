"""When each rank of a pipeline computes what: the schedule of parallel/schedules.py with the times of its actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from optimum_trn.parallel.schedules import STAGES_PER_RANK, Action, ScheduleName, actions

STEADY = 4
"""Micro-batches a rank after which a step grows by the same time for each further one."""


@dataclass(frozen=True)
class Span:
    """One action of a rank, from `start` to `end` in seconds."""

    action: Action
    start: float
    end: float


def timeline(
    schedule: ScheduleName,
    num_ranks: int,
    num_micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> list[list[Span]]:
    """The spans of every rank; `forward` and `backward` are seconds of each stage, `transfer` from one to the next.

    An action starts when its rank is free and what it needs has arrived; of a backward pass in two parts, each takes
    half.
    """
    orders = _orders(schedule, num_ranks, num_micro_batches)
    stages = num_ranks * STAGES_PER_RANK[schedule]
    done: dict[tuple[str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    places, free = [0] * num_ranks, [0.0] * num_ranks
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        while places[rank] < len(orders[rank]):
            action = orders[rank][places[rank]]
            needed = _needed(action, stages)
            if needed is not None and needed not in done:
                waiting[needed].append(rank)
                break
            arrival = 0.0 if needed is None else done[needed] + (transfer if needed[1] != action.stage else 0.0)
            start = max(free[rank], arrival)
            seconds = forward[action.stage] if action.kind == "forward" else backward[action.stage]
            end = start + seconds * (0.5 if "gradient" in action.kind else 1.0)
            spans[rank].append(Span(action, start, end))
            free[rank] = end
            places[rank] += 1
            kind = "forward" if action.kind == "forward" else "backward"
            if action.kind != "weight gradient":
                key = (kind, action.stage, action.micro_batch)
                done[key] = end
                ready += waiting.pop(key, [])
    return spans


def step_seconds(
    schedule: ScheduleName,
    num_ranks: int,
    num_micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> float:
    """Seconds until the last rank has done its last action; a long step is continued from two shorter ones."""
    short = STEADY * num_ranks
    if num_micro_batches <= short + 2 * num_ranks:
        spans = timeline(schedule, num_ranks, num_micro_batches, forward, backward, transfer)
        return max(own[-1].end for own in spans)
    whole, rest = divmod(num_micro_batches - short, num_ranks)
    first, second = (
        step_seconds(schedule, num_ranks, short + rest + more, forward, backward, transfer) for more in (0, num_ranks)
    )
    return first + (second - first) * whole


def least_seconds(
    schedule: ScheduleName,
    num_ranks: int,
    num_micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> float:
    """A lower bound of `step_seconds`: the last rank waits for the first activations, the first for the end."""
    before = num_ranks - 1
    own = sum(forward[stage] + backward[stage] for stage in range(before, len(forward), num_ranks))
    rest = 0.0 if schedule == "zero_bubble" else sum(backward[:before])  # there, the last rank may fill it
    return sum(forward[:before]) + num_micro_batches * own + rest


@lru_cache(maxsize=64)
def _orders(schedule: ScheduleName, num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(actions(schedule, num_ranks, rank, num_micro_batches)) for rank in range(num_ranks))


def _needed(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What must be done before an action: of the neighbouring stage, or of the same one."""
    kind, stage, micro_batch = action
    if kind == "forward":
        return ("forward", stage - 1, micro_batch) if stage else None
    if kind == "weight gradient":
        return ("backward", stage, micro_batch)
    return ("backward", stage + 1, micro_batch) if stage + 1 < stages else ("forward", stage, micro_batch)
