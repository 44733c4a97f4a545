"""Which pipelines a number of nodes make, and how the micro-batches of a step are shared out among them: exact."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from optimum_trn.errors import PlanError


class Timed(Protocol):
    """What takes longer with more micro-batches, such as a `PipelineTemplate`."""

    def iteration_seconds(self, micro_batches: int) -> float:
        """Seconds of one iteration."""


def distribute(micro_batches: int, pipelines: Sequence[Timed]) -> list[int]:
    """Micro-batches of each pipeline, at least one, such that the slowest is as fast as can be.

    One after the other goes to the pipeline that would then be the first to finish, the earlier of equal ones: since
    times only grow, no exchange can make the slowest faster.  `PlanError` for fewer micro-batches than pipelines.
    """
    if micro_batches < len(pipelines):
        raise PlanError(
            f"A step of {micro_batches} micro-batches does not feed {len(pipelines)} pipelines. Raise "
            f"gradient_accumulation_steps to at least {len(pipelines)}, or start fewer nodes."
        )
    counts = [1] * len(pipelines)
    queue = [(pipeline.iteration_seconds(2), place) for place, pipeline in enumerate(pipelines)]
    heapq.heapify(queue)
    for _ in range(micro_batches - len(pipelines)):
        _, place = queue[0]
        counts[place] += 1
        heapq.heapreplace(queue, (pipelines[place].iteration_seconds(counts[place] + 1), place))
    return counts


def slowest_seconds(pipelines: Sequence[Timed], counts: Sequence[int]) -> float:
    """Seconds until the last of the pipelines has done its micro-batches."""
    return max(pipeline.iteration_seconds(count) for pipeline, count in zip(pipelines, counts, strict=True))


def instantiate(nodes: int, losses: int, micro_batches: int, templates: Mapping[int, Timed]) -> list[int]:
    """The sizes of the pipelines, largest first, that use all nodes, are more than `losses`, and take least time.

    Of equally fast ones the most pipelines: more copies of every layer.  Raises `PlanError` where there are none.

    Searches over the possible times of a step; for each, the most micro-batches that `nodes` nodes can do in
    that time in exactly so many pipelines is an unbounded knapsack.
    """
    least = min(templates)
    most = min(nodes // least, micro_batches)
    if most <= losses:
        raise PlanError(
            f"{nodes} nodes with {micro_batches} micro-batches a step make at most {most} pipelines of at least "
            f"{least} nodes, but to survive {losses} losses takes {losses + 1}. Start more nodes, raise "
            "gradient_accumulation_steps, or lower fault_tolerance."
        )
    times = sorted(
        {
            template.iteration_seconds(count)
            for template in templates.values()
            for count in range(1, micro_batches - losses + 1)
        }
    )
    low, high, found = 0, len(times) - 1, None
    while low <= high:
        middle = (low + high) // 2
        sizes = _within(times[middle], nodes, losses, micro_batches, most, templates)
        if sizes is None:
            low = middle + 1
        else:
            found, high = sizes, middle - 1
    if found is None:
        raise PlanError(f"No {losses + 1} or more pipelines of {sorted(templates)} nodes use all of {nodes} nodes.")
    return found


def _within(
    seconds: float, nodes: int, losses: int, micro_batches: int, most: int, templates: Mapping[int, Timed]
) -> list[int] | None:
    """Pipelines that do all micro-batches in that time: the most of them that can, or None."""
    rates = {size: _micro_batches_within(seconds, template, micro_batches) for size, template in templates.items()}
    rates = {size: rate for size, rate in rates.items() if rate >= 1}
    capacity = [[-math.inf] * (nodes + 1) for _ in range(most + 1)]
    choice = [[0] * (nodes + 1) for _ in range(most + 1)]
    capacity[0][0] = 0
    for count in range(1, most + 1):
        for total in range(nodes + 1):
            for size, rate in rates.items():
                before = capacity[count - 1][total - size] if size <= total else -math.inf
                if before + rate > capacity[count][total]:
                    capacity[count][total], choice[count][total] = before + rate, size
    for count in range(most, losses, -1):
        if capacity[count][nodes] >= micro_batches:
            sizes, left = [], nodes
            for place in range(count, 0, -1):
                sizes.append(choice[place][left])
                left -= sizes[-1]
            return sorted(sizes, reverse=True)
    return None


def _micro_batches_within(seconds: float, template: Timed, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if template.iteration_seconds(middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low
