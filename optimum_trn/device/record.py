"""What one core does between two cuts of its graph: one schema, for the device's recorder and for the trace on fakes.

An operator is what the dispatcher hands to a kernel of the device, by its name in torch's schema with the overload
("aten::mm", "aten::add.Tensor"). Neither views nor bare allocations are operators, nor what a kernel calls itself, so
that it does not matter who looks: a producer above the dispatcher takes composite operators apart first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Scalar = bool | int | float | str | None

CutReason = Literal["step", "scalar", "copy to host", "copy from host", "print"]
"""Why a graph ends: the step is over, a scalar is read (`.item()`), a tensor leaves the core or comes, is printed."""


@dataclass(frozen=True)
class TensorType:
    """What a compiler knows of a tensor: its shape in elements, and its dtype without "torch."."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Operation:
    """One operator: its tensors in the order of the schema, lists flattened, and the scalars that change its code.

    Scalars are numbers, booleans, strings and dtypes as text; lists of them are flattened. Seeds, generators and
    devices are none, nor are numbers that the hardware takes as inputs.
    """

    name: str
    inputs: tuple[TensorType, ...]
    scalars: tuple[Scalar, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join([*map(str, self.inputs), *map(str, self.scalars)])})"


@dataclass(frozen=True)
class Collective:
    """One collective of this rank: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" ...

    `inputs` are what this rank gives (what it receives, for "recv"), `ranks` the members of the group as global ranks,
    of which `peer` is the other end of a send or receive.
    """

    name: str
    inputs: tuple[TensorType, ...]
    ranks: tuple[int, ...]
    reduction: str | None = None
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.inputs))}; {len(self.ranks)} ranks)"


@dataclass(frozen=True)
class Allocation:
    """A change of the HBM that tensors hold: `size` bytes more, or fewer where it is negative."""

    size: int


@dataclass(frozen=True)
class Cut:
    """The end of a graph, and `where` in the user's script: "train.py:63", or "" where nobody's line caused it."""

    reason: CutReason
    where: str = ""


Event = Operation | Collective | Allocation | Cut


@dataclass
class StepRecord:
    """The events of one core in the order in which they happened; `simulated` says that no core did them."""

    events: list[Event] = field(default_factory=list)
    simulated: bool = True

    @property
    def operations(self) -> list[Operation]:
        """The operators alone."""
        return [event for event in self.events if isinstance(event, Operation)]

    @property
    def collectives(self) -> list[Collective]:
        """The collectives alone."""
        return [event for event in self.events if isinstance(event, Collective)]

    @property
    def cuts(self) -> list[Cut]:
        """What ended graphs, the end of the step included."""
        return [event for event in self.events if isinstance(event, Cut)]

    @property
    def peak_bytes(self) -> int:
        """The largest sum of allocations since the record began, 0 where it only freed."""
        held = peak = 0
        for event in self.events:
            if isinstance(event, Allocation):
                held += event.size
                peak = max(peak, held)
        return peak

    def graphs(self) -> Iterator[list[Operation | Collective]]:
        """What lies between two cuts; empty graphs are left out."""
        graph: list[Operation | Collective] = []
        for event in self.events:
            if isinstance(event, Operation | Collective):
                graph.append(event)
            elif isinstance(event, Cut) and graph:
                yield graph
                graph = []
        if graph:
            yield graph


def graph_key(graph: list[Operation | Collective]) -> str:
    """The content of a graph and nothing else, as 20 hexadecimal digits: equal graphs are compiled once."""
    digest = hashlib.sha256("\n".join(map(str, graph)).encode())
    return digest.hexdigest()[:20]
