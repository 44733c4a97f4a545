"""How pipelines are rebuilt from the nodes that are left, and from whom each gets the layers that it lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from optimum_trn.errors import CheckpointError, PlanError

Action = Literal["shrink", "borrow", "merge", "recompose", "join"]
Pipelines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Reconfiguration:
    """The pipelines after a change, and what was done to get there.

    Nodes are in the order of their stages, which is ascending: torch gives the ranks of a group no other order.
    """

    pipelines: Pipelines
    actions: tuple[Action, ...] = ()


class NoPipelineError(PlanError):
    """Fewer nodes are left than one pipeline needs."""


@dataclass
class _Rebuilding:
    """The pipelines while they change: at most `most`, with at most `largest` nodes each."""

    pipelines: list[list[int]]
    minimum: int
    largest: int
    losses: int
    most: float
    actions: list[Action] = field(default_factory=list)

    def borrow_and_merge(self) -> None:
        """Pipelines with too few nodes take one from the largest that can spare it; else they join others."""
        while deficient := [pipeline for pipeline in self.pipelines if len(pipeline) < self.minimum]:
            poor = max(deficient, key=lambda pipeline: (len(pipeline), -pipeline[0]))
            others = [pipeline for pipeline in self.pipelines if pipeline is not poor]
            rich = max(others, key=lambda pipeline: (len(pipeline), -pipeline[0]), default=None)
            if rich is None:
                raise NoPipelineError(
                    f"{len(poor)} nodes are left, but a pipeline needs {self.minimum}. Start the job again with more "
                    "nodes: it resumes from its last checkpoint."
                )
            if len(rich) > self.minimum:
                poor.append(rich.pop())
                self.actions.append("borrow")
                continue
            # Two that lack nodes first: that keeps the whole copies that there are.
            partner = next((other for other in others if len(other) < self.minimum), rich)
            partner.extend(poor)
            self.pipelines.remove(poor)
            self.actions.append("merge")

    def recompose(self) -> None:
        """Makes new pipelines of the nodes that others can spare, while there are too few copies to survive losses."""
        while len(self.pipelines) <= self.losses and self._spare() >= self.minimum:
            self.pipelines.append([self._spared() for _ in range(self.minimum)])
            self.actions.append("recompose")

    def join(self, nodes: Sequence[int]) -> None:
        """New nodes make pipelines of their own where they can; the others go to the smallest pipelines there are."""
        waiting = list(nodes)
        if waiting:
            self.actions.append("join")
        while len(waiting) >= self.minimum and len(self.pipelines) < self.most:
            self.pipelines.append(waiting[: self.minimum])
            del waiting[: self.minimum]
        for node in waiting:
            smallest = min(self.pipelines, key=len, default=None)
            if smallest is None:
                self.pipelines.append([node])
                continue
            smallest.append(node)
            if len(smallest) > self.largest:  # so has every other; it is at least twice the minimum
                if len(self.pipelines) >= self.most:
                    raise PlanError(
                        f"{len(self.pipelines)} pipelines of {self.largest} nodes have no place for another node. "
                        "Raise gradient_accumulation_steps, which feeds more pipelines."
                    )
                self.pipelines.append(smallest[-self.minimum :])
                del smallest[-self.minimum :]

    def _spare(self) -> int:
        return sum(max(0, len(pipeline) - self.minimum) for pipeline in self.pipelines)

    def _spared(self) -> int:
        return max(self.pipelines, key=len).pop()


def reconfigure(
    pipelines: Sequence[Sequence[int]],
    lost: Iterable[int],
    minimum: int,
    sizes: range,
    losses: int,
    joined: Sequence[int] = (),
    most: float = math.inf,
) -> Reconfiguration:
    """The pipelines after the loss of some nodes and the arrival of others: every node that is there is used.

    Shrink (a smaller template), borrow and merge are those of Oobleck; recompose restores `losses` + 1 copies of the
    model wherever (`losses` + 1) x `minimum` nodes are left.  `most` is how many pipelines a step can feed; `sizes` are
    those that have a template.  The same on every node that computes it.  Raises
    `NoPipelineError` if fewer than `minimum` nodes are left.
    """
    gone = set(lost)
    left = [[node for node in pipeline if node not in gone] for pipeline in pipelines]
    work = _Rebuilding([pipeline for pipeline in left if pipeline], minimum, sizes[-1], losses, most)
    shrunk = any(minimum <= len(now) < len(before) for now, before in zip(left, pipelines, strict=True))
    if shrunk:
        work.actions.append("shrink")
    work.join(joined)
    if not work.pipelines:
        raise NoPipelineError(f"No node is left of {sum(map(len, pipelines))}.")
    work.borrow_and_merge()
    work.recompose()
    return Reconfiguration(tuple(tuple(sorted(pipeline)) for pipeline in work.pipelines), tuple(work.actions))


class Copy(NamedTuple):
    """One piece of state that `target` gets from `source`."""

    piece: str
    source: int
    target: int


def copies(
    sizes: Mapping[str, int], held: Mapping[int, Iterable[str]], needed: Mapping[int, Iterable[str]]
) -> list[Copy]:
    """From whom each node gets the pieces that it needs and does not hold, the load spread over all that hold them.

    `sizes` are the bytes of the pieces, in an order that all nodes share.  The largest go first, each from the source
    that has least to send.  Raises `CheckpointError` for a piece that nobody holds.
    """
    holders: dict[str, list[int]] = {}
    for node in sorted(held):
        for piece in held[node]:
            holders.setdefault(piece, []).append(node)
    load: dict[int, int] = dict.fromkeys(held, 0)
    found = []
    order = {piece: place for place, piece in enumerate(sizes)}
    missing = [(piece, node) for node in sorted(needed) for piece in needed[node] if node not in holders.get(piece, [])]
    for piece, target in sorted(missing, key=lambda pair: (-sizes[pair[0]], order[pair[0]], pair[1])):
        if not holders.get(piece):
            raise CheckpointError(
                f"{piece} is on none of the {len(held)} nodes that are left: more nodes were lost at once than "
                "fault_tolerance allows. Start the job again: it resumes from its last checkpoint."
            )
        source = min(holders[piece], key=lambda node: (load[node], node))
        load[source] += sizes[piece]
        found.append(Copy(piece, source, target))
    return sorted(found, key=lambda copy: (order[copy.piece], copy.target))
