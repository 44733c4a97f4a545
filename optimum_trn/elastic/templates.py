"""Pipeline templates: for every number of nodes that a pipeline may have, the fastest cut of the layers over them.

Pipeline templates are those of Oobleck (Jang et al. 2023, arXiv:2309.08125).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from optimum_trn.errors import PlanError

GENERATION_MICRO_BATCHES = 4
"""Micro-batches a stage for which templates are cut, as in Oobleck: enough that the bubble does not decide."""


def template_sizes(nodes: int, minimum: int, losses: int) -> range:
    """The numbers of nodes for which templates are needed: consecutive, from `minimum` on.

    With `losses` + 1 pipelines none is larger than `nodes` - `losses` x `minimum`. A pipeline that has lost nodes may
    be joined with a minimal one, which makes 2 x `minimum` - 1 at most: templates reach that far, too, and then sums
    of their sizes are every number of nodes from `minimum` on.  Raises `PlanError` for fewer than (`losses` + 1) x
    `minimum` nodes.
    """
    if minimum < 1 or losses < 0:
        raise PlanError(
            f"A pipeline needs at least one node and survives 0 losses or more, not {minimum} and {losses}."
        )
    if nodes < (losses + 1) * minimum:
        raise PlanError(
            f"To survive {losses} losses at once takes {losses + 1} copies of the model, of {minimum} nodes each: "
            f"{(losses + 1) * minimum} nodes, but there are {nodes}. Start more nodes, or lower fault_tolerance."
        )
    return range(minimum, max(nodes - losses * minimum, 2 * minimum - 1) + 1)


def iteration_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """Seconds of one iteration of a 1F1B pipeline whose stages take that long, forward and backward, for a micro-batch.

    T1 + T2 + T3 of Oobleck, section 4.1.2: the first micro-batch passes all stages, the last slowest stage k works
    on the others without a pause, and the last one passes from there to the end.  For S equal stages of w seconds it is
    exactly (micro_batches + S - 1) w.
    """
    slowest = max(stages)
    place = max(index for index, seconds in enumerate(stages) if seconds == slowest)
    return sum(stages) + (micro_batches - len(stages) + place - 1) * slowest + sum(stages[place:])


@dataclass(frozen=True)
class PipelineTemplate:
    """How `nodes` nodes share the layers: stage s runs layers `ends[s - 1]` to `ends[s]` (not included).

    `seconds` are those of the stages for one micro-batch, forward and backward; stages of one node are neighbours.
    """

    nodes: int
    ends: tuple[int, ...]
    seconds: tuple[float, ...]

    def iteration_seconds(self, micro_batches: int) -> float:
        """Seconds of one iteration with that many micro-batches, which grow with their number."""
        return iteration_seconds(self.seconds, micro_batches)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])


def make_templates(layers: Sequence[float], sizes: range, devices_per_node: int = 1) -> dict[int, PipelineTemplate]:
    """The fastest template of every size, by its number of nodes; `layers` are seconds of a micro-batch.

    Every device is one stage.  Raises `PlanError` where a template would have more stages than there are layers.
    """
    largest = sizes[-1] * devices_per_node
    if largest > len(layers):
        raise PlanError(
            f"A pipeline may grow to {sizes[-1]} nodes of {devices_per_node} devices, {largest} stages, but the model "
            f"has {len(layers)} layers. Start fewer nodes, or raise fault_tolerance, which makes smaller pipelines."
        )
    found = {}
    for nodes in sizes:
        ends = best_cut(layers, nodes * devices_per_node)
        sums = [0.0, *accumulate(layers)]
        seconds = tuple(sums[end] - sums[start] for start, end in pairwise((0, *ends)))
        found[nodes] = PipelineTemplate(nodes, ends, seconds)
    return found


def best_cut(layers: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Where each of `num_stages` runs of layers ends, so that `iteration_seconds` is least: exact.

    The formula depends on the stages only through the last slowest one, its place and where it starts.  So every run of
    layers is tried as that one: the layers before it are packed into as few stages that are no slower as will do, those
    behind it into stages that are faster; splitting gives every larger number of stages, and the earlier the
    place, the less time.
    """
    count = len(layers)
    if not 1 <= num_stages <= count:
        raise PlanError(f"{count} layers cannot be cut into {num_stages} stages.")
    sums = [0, *accumulate(layers)]
    micro_batches = GENERATION_MICRO_BATCHES * num_stages
    best: tuple[float, int, int, int] | None = None
    for start in range(count):
        for end in range(start + 1, count + 1):
            limit = sums[end] - sums[start]
            before, behind = _fewest(sums, 0, start, limit, True), _fewest(sums, end, count, limit, False)
            if before is None or behind is None:
                continue
            place = max(before, num_stages - 1 - (count - end))
            if place > start or num_stages - 1 - place < behind:
                continue
            time = sums[-1] + (micro_batches - num_stages + place - 1) * limit + sums[-1] - sums[start]
            if best is None or time < best[0]:
                best = time, place, start, end
    assert best is not None  # the slowest stage of any cut is one of the runs that were tried
    _, place, start, end = best
    limit = sums[end] - sums[start]
    head = _packed(sums, 0, start, limit, True, place)
    tail = _packed(sums, end, count, limit, False, num_stages - 1 - place)
    return (*head, end, *tail)


def _fits(sums: Sequence[float], start: int, end: int, limit: float, inclusive: bool) -> bool:
    seconds = sums[end] - sums[start]
    return seconds <= limit if inclusive else seconds < limit


def _reach(sums: Sequence[float], start: int, end: int, limit: float, inclusive: bool) -> int:
    """The end of the longest run from `start` on that fits."""
    reached = min(end, bisect_right(sums, sums[start] + limit, start, end + 1) - 1)
    # A sum that is rounded otherwise than a difference must not decide: one measure for all.
    while reached < end and _fits(sums, start, reached + 1, limit, inclusive):
        reached += 1
    while reached > start and not _fits(sums, start, reached, limit, inclusive):
        reached -= 1
    return reached


def _fewest(sums: Sequence[float], start: int, end: int, limit: float, inclusive: bool) -> int | None:
    """The least number of stages for a run of layers, none above `limit`; None where one layer alone is."""
    stages = 0
    while start < end:
        reached = _reach(sums, start, end, limit, inclusive)
        if reached == start:
            return None
        start, stages = reached, stages + 1
    return stages


def _packed(sums: Sequence[float], start: int, end: int, limit: float, inclusive: bool, num_stages: int) -> list[int]:
    """The ends of that many stages for a run of layers: as full as can be, with enough layers left for the rest."""
    ends = []
    for left in range(num_stages - 1, -1, -1):
        start = min(_reach(sums, start, end, limit, inclusive), end - left)
        ends.append(start)
    return ends


def minimum_nodes(bytes_per_node: Sequence[float], capacity: float) -> int:
    """The fewest nodes whose fullest has room, from what the fullest of 1, 2, ... nodes needs.

    Raises `PlanError` where even the largest number has not.
    """
    for nodes, needed in enumerate(bytes_per_node, start=1):
        if needed <= capacity:
            return nodes
    least = min(bytes_per_node, default=math.inf)
    raise PlanError(
        f"The model fits no pipeline of up to {len(bytes_per_node)} nodes: the fullest device still needs "
        f"{least / 2**30:.1f} GiB of {capacity / 2**30:.1f}. Start more nodes, or lower the micro-batch."
    )
