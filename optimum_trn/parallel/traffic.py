"""What collectives cost on each class of links: the bytes that arrive at this rank, counted as they are issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimum_trn.parallel.topology import Topology

# By operator: the bytes that arrive over one link of a ring of n ranks, for a result of the given bytes (Chan et al.
# 2007, "Collective communication: theory, practice, and experience", section 4: the bucket algorithms).
RING: dict[str, Callable[[int, int], int]] = {
    "allreduce_": lambda size, ranks: 2 * (ranks - 1) * size // ranks,
    "allgather_": lambda size, ranks: (ranks - 1) * size // ranks,
    "_allgather_base_": lambda size, ranks: (ranks - 1) * size // ranks,
    "reduce_scatter_": lambda size, ranks: (ranks - 1) * size,
    "_reduce_scatter_base_": lambda size, ranks: (ranks - 1) * size,
}


class Traffic(TorchDispatchMode):
    """Inside, counts what collectives bring to this rank, in `received`: bytes by (operator, class of link).

    The operators are those of `RING`, named as in torch.ops.c10d; each is counted as a ring in the order of the group's
    ranks, over the link from the rank before. A single all-to-all, "alltoall_base_", comes from each rank over the link
    from there. Bytes that arrive at a node from others are what its ranks receive over
    links of class "network".
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.received: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in RING:
                self._count(name, args)
            elif name == "alltoall_base_":
                self._count_all_to_all(name, *args[:4])
        return func(*args, **(kwargs or {}))

    def over(self, link: str) -> int:
        """All bytes that arrived over links of that class."""
        return sum(size for (_, on), size in self.received.items() if on == link)

    def _count(self, name: str, args: Sequence[Any]) -> None:
        ranks = dist.get_process_group_ranks(next(_groups_in(args)))
        size = sum(result.nbytes for result in tree_leaves(args[0]) if isinstance(result, Tensor))
        before = ranks[ranks.index(dist.get_rank()) - 1]
        self.received[name, self.topology.link([before, dist.get_rank()])] += RING[name](size, len(ranks))

    def _count_all_to_all(self, name: str, output: Tensor, input: Tensor, group: Any, rows: Sequence[int]) -> None:
        ranks, rank = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)), dist.get_rank()
        for source, count in zip(ranks, rows or [len(output) // len(ranks)] * len(ranks), strict=True):
            if source != rank and count:
                arrived = count * (output.nbytes // len(output))
                self.received[name, self.topology.link([source, rank])] += arrived


def _groups_in(args: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            yield dist.ProcessGroup.unbox(argument)
