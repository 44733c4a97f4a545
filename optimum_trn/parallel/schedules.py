"""Pipeline schedules, as data: what each rank computes in which order, and how many activations that keeps alive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
STAGES_PER_RANK: dict[ScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1}
"""The schedules, and how many stages each rank has: stage s runs on rank s modulo the number of ranks."""

Kind = Literal["forward", "backward", "input gradient", "weight gradient"]


class Action(NamedTuple):
    """One computation of one micro-batch on one stage; "backward" is both of the gradients at once."""

    kind: Kind
    stage: int
    micro_batch: int


def actions(schedule: ScheduleName, num_ranks: int, rank: int, num_micro_batches: int) -> list[Action]:
    """What `rank` of `num_ranks` computes in one step, in order, for any number of micro-batches.

    GPipe: Huang et al. 2019 (arXiv:1811.06965).  1F1B and its interleaved form: Narayanan et al. 2021
    (arXiv:2104.04473), section 2.2.  Zero bubble is ZB-H1 of Qi et al. 2023 (arXiv:2401.10241): 1F1B in which the
    gradients of the weights wait until nothing else is to do, without more memory than 1F1B needs on the first rank.
    """
    stages = STAGES_PER_RANK[schedule]
    forwards = [Action("forward", *place) for place in _places(num_ranks, rank, stages, num_micro_batches)]
    backwards = [
        Action("backward", num_ranks * stages - 1 - stage, micro_batch)
        for stage, micro_batch in _places(num_ranks, num_ranks - 1 - rank, stages, num_micro_batches)
    ]
    if schedule == "gpipe":
        return forwards + backwards
    if schedule == "zero_bubble":
        return list(_zero_bubble(forwards, backwards, num_ranks, rank))
    warm_up = _warm_up(num_ranks, rank, stages, num_micro_batches)
    return list(_one_forward_one_backward(forwards, backwards, warm_up))


def forward_actions(num_stages: int, num_ranks: int, rank: int) -> list[Action]:
    """What `rank` computes for one batch that is only evaluated."""
    return [Action("forward", stage, 0) for stage in range(rank, num_stages, num_ranks)]


def in_flight_bound(schedule: ScheduleName, num_ranks: int, rank: int, num_micro_batches: int) -> int:
    """How many times a stage of `rank` has run forward, at most, without the backward that frees what it keeps."""
    stages = STAGES_PER_RANK[schedule]
    bounds: dict[ScheduleName, int] = {
        "gpipe": stages * num_micro_batches,
        "1f1b": num_ranks - rank,
        "interleaved_1f1b": _warm_up(num_ranks, rank, stages, num_micro_batches) + 1,
        "zero_bubble": num_ranks,
    }
    return min(bounds[schedule], stages * num_micro_batches)


def _warm_up(num_ranks: int, rank: int, stages: int, num_micro_batches: int) -> int:
    """The forwards before the first backward can follow."""
    behind = num_ranks - rank - 1
    return behind if stages == 1 else 2 * behind + (stages - 1) * len(_rounds(num_ranks, num_micro_batches)[0])


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """The micro-batches that pass one stage together before they pass the next one of the same rank.

    At least as many as there are ranks: with fewer, each would come back before the rank before has sent it.
    """
    count = max(1, num_micro_batches // num_ranks)
    bounds = [-(-place * num_micro_batches // count) for place in range(count + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def _places(num_ranks: int, rank: int, stages: int, num_micro_batches: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch) in the order of the forwards."""
    for together in _rounds(num_ranks, num_micro_batches):
        for stage in range(stages):
            for micro_batch in together:
                yield stage * num_ranks + rank, micro_batch


def _one_forward_one_backward(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    yield from forwards[:warm_up]
    for place, action in enumerate(backwards):
        yield from forwards[warm_up + place : warm_up + place + 1]
        yield action


def _zero_bubble(forwards: list[Action], backwards: list[Action], num_ranks: int, rank: int) -> Iterator[Action]:
    warm_up = num_ranks - rank - 1
    yield from forwards[:warm_up]
    for place, backward in enumerate(backwards):
        yield from forwards[warm_up + place : warm_up + place + 1]
        yield backward._replace(kind="input gradient")
        if place >= rank:  # later ranks, which start later, leave that many to fill the bubble at the end
            yield backwards[place - rank]._replace(kind="weight gradient")
    for backward in backwards[max(0, len(backwards) - rank) :]:
        yield backward._replace(kind="weight gradient")
