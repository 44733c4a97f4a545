"""Which machines hold copies of each other's memory checkpoints, and how likely a loss of some of them is survived.

Group and mixed placement are those of Gemini (Wang et al., SOSP 2023, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from ..errors import PlanError


@dataclass(frozen=True)
class Placement:
    """Groups of machines that hold copies for each other; `replicas` copies of everything, one on its own machine.

    In a group of more than `replicas` machines each has its copies on itself and those that follow it, in a ring.
    """

    groups: tuple[range, ...]
    replicas: int

    @property
    def machines(self) -> int:
        """How many machines there are, which are numbered from 0."""
        return self.groups[-1].stop

    def holders(self, machine: int) -> tuple[int, ...]:
        """The machines that hold what a machine has saved, itself first."""
        group = next(group for group in self.groups if machine in group)
        place = machine - group.start
        return tuple(group[(place + distance) % len(group)] for distance in range(self.replicas))

    def survives(self, lost: Iterable[int]) -> bool:
        """Whether everything is still in the memory of a machine when these are lost."""
        gone = set(lost)
        return not any(gone.issuperset(self.holders(machine)) for machine in gone)

    def recovery_probability(self, lost: int) -> float:
        """How likely memory is enough when `lost` machines, any of them with the same probability, fail at once.

        Exact: the sets of machines that may fail are counted, group by group.
        """
        if not 0 <= lost <= self.machines:
            raise PlanError(f"{lost} of {self.machines} machines can't be lost.")
        counts = reduce(_product, (_survivable_sets(len(group), self.replicas) for group in self.groups))
        return counts[lost] / math.comb(self.machines, lost) if lost < len(counts) else 0.0


def mixed_placement(machines: int, replicas: int) -> Placement:
    """Groups of `replicas` machines; the last one takes those that are left over, and is a ring.

    Of all placements it loses the fewest sets of `replicas` machines where `replicas` divides `machines`, and else
    at most 2 x `replicas` - 3 more than the fewest (Gemini, theorem 1). Raises `PlanError` if there are not so many
    machines.
    """
    if not 1 <= replicas <= machines:
        raise PlanError(
            f"{replicas} copies of a memory checkpoint, each on another machine, need as many machines, but there are "
            f"{machines}. Lower memory_checkpoint_replicas or start more machines."
        )
    starts = range(0, machines // replicas * replicas, replicas)
    groups = [range(start, start + replicas) for start in starts]
    groups[-1] = range(groups[-1].start, machines)
    return Placement(tuple(groups), replicas)


def ring_placement(machines: int, replicas: int) -> Placement:
    """One ring of all machines: what the mixed placement is compared with."""
    mixed_placement(machines, replicas)  # raises for what no placement can do
    return Placement((range(machines),), replicas)


def recovery_bound(machines: int, replicas: int, lost: int) -> float:
    """Gemini's lower bound of the probability where `replicas` divides `machines` (corollary 1); else a reference."""
    if lost < replicas:
        return 1.0
    bad = machines * math.comb(machines - replicas, lost - replicas) / (replicas * math.comb(machines, lost))
    return max(0.0, 1.0 - bad)


def _survivable_sets(size: int, replicas: int) -> list[int]:
    """How many sets of 0, 1, 2 ... machines of a group may be lost: those without `replicas` neighbours in its ring.

    Sets of k < size machines leave z = size - k, after each of which comes a gap of at most `replicas` - 1 lost ones.
    There are as many ways to fill z gaps as bounded compositions of k; turning the ring gives size / z sets for each.
    """
    counts = []
    for lost in range(size):
        kept = size - lost
        counts.append(_bounded_compositions(lost, kept, replicas - 1) * size // kept)
    while counts[-1] == 0:
        counts.pop()
    return counts


def _bounded_compositions(total: int, parts: int, largest: int) -> int:
    """How many ordered sums of `parts` numbers from 0 to `largest` are `total`, by inclusion and exclusion."""
    step = largest + 1
    return sum(
        (-1) ** over * math.comb(parts, over) * math.comb(total - over * step + parts - 1, parts - 1)
        for over in range(min(parts, total // step) + 1)
    )


def _product(left: list[int], right: list[int]) -> list[int]:
    counts = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            counts[i + j] += a * b
    return counts
