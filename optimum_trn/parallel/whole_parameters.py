"""Optimizers that must see whole parameters, on ranks that hold shards of them: one rank updates each parameter whole.

Adafactor takes means over rows and columns, Muon orthogonalises matrices, LAMB-like ones take norms. Before a step the
shards of a parameter and of its gradient are gathered, its owner updates it, and all take their shards of it back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.mics import copy_whole, whole
from optimum_trn.parallel.sharding import Placement
from optimum_trn.parallel.wrapped_optimizer import WrappedOptimizer


class Shards(NamedTuple):
    """How a parameter lies over the ranks of a group, and this rank's place among them."""

    placement: Placement
    group: dist.ProcessGroup
    rank: int


class Cut(NamedTuple):
    """A group over which a parameter is cut, and which of its ranks is, or leads to, the owner."""

    group: dist.ProcessGroup
    owner: int


class CutParameter:
    """A parameter of which this rank has a shard, and the whole one, which its owner's optimizer updates.

    The parameter is a tensor that lies as `shards` say, a DTensor of such a tensor, or only a DTensor (`shards` None).
    """

    def __init__(self, local: nn.Parameter, shards: Shards | None, owned: dict[Any, list[int]]) -> None:
        """`owned` counts the elements that each rank of the same groups owns; the one that has fewest is the owner."""
        self.local = local
        self.shards = shards
        self.shape = tuple(local.shape) if shards is None else shards.placement.global_shape
        groups = [] if shards is None else [shards.group]
        if isinstance(local, DTensor):
            mesh = local.device_mesh
            groups.insert(0, mesh.get_group(mesh.ndim - 1))
        sizes = [dist.get_world_size(group) for group in groups]
        elements = owned.setdefault(tuple(group.group_name for group in groups), [0] * math.prod(sizes))
        owner = min(range(len(elements)), key=lambda rank: (elements[rank], rank))
        elements[owner] += math.prod(self.shape)
        self.cuts = []
        for group, size in zip(groups, sizes, strict=True):
            owner, place = divmod(owner, size)
            self.cuts.append(Cut(group, place))
        self.is_owner = all(dist.get_rank(group) == place for group, place in self.cuts)
        own = local.to_local() if isinstance(local, DTensor) else local
        self.whole = nn.Parameter(own.detach().new_empty(0))

    def gather(self) -> None:
        """Give the owner the whole parameter and its gradient: a collective."""
        grad = torch.zeros_like(self.local) if self.local.grad is None else self.local.grad
        values, gradient = self._gathered(self.local), self._gathered(grad)
        if self.is_owner:
            self.whole.data, self.whole.grad = values.clone(), gradient.to(values.dtype)

    def share(self) -> None:
        """Take this rank's shard of what the owner has made of the parameter: a collective."""
        values = self.whole.detach() if self.is_owner else self.whole.new_empty(self.shape)
        for group, owner in self.cuts:  # to all that have the owner's place in the groups that follow
            dist.broadcast(values, group=group, group_src=owner)
        copy_whole(self.local, values if self.shards is None else self.shards.placement.shard(values, self.shards.rank))
        self.whole.data, self.whole.grad = values.new_empty(0), None

    def _gathered(self, tensor: Tensor) -> Tensor:
        tensor = whole(tensor.detach())
        return tensor if self.shards is None else unshard_from_group(tensor, self.shards.placement, self.shards.group)


class WholeParameters(WrappedOptimizer):
    """Wraps an optimizer whose parameters are shards: each is updated whole, on one of the ranks that share it.

    `shards` says by the `id` of a parameter how it lies. What is not in it is whole, unless it is a DTensor, which
    FSDP2 has cut. The states of a parameter are its owner's, in the shape that one process has; whole parameters and
    gradients exist during the step only. All ranks must have the parameters in the same order, and step together.
    Raises ValueError for an optimizer that has made steps before, on shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Mapping[int, Shards]) -> None:
        self.optimizer = optimizer
        self.cut: list[CutParameter] = []
        owned: dict[Any, list[int]] = {}
        for group in optimizer.param_groups:
            parameters = []
            for parameter in group["params"]:
                own = shards.get(id(parameter))
                own = None if own is None or own.placement.dim is None else own
                if own is None and not isinstance(parameter, DTensor):
                    parameters.append(parameter)
                    continue
                if optimizer.state.pop(parameter, None):
                    raise ValueError(
                        f"{type(optimizer).__name__} has made steps on shards of parameters that it must see whole. "
                        "Give the trainer a new one."
                    )
                self.cut.append(CutParameter(parameter, own, owned))
                if self.cut[-1].is_owner:
                    parameters.append(self.cut[-1].whole)
            group["params"] = parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update what has a gradient on any rank; a collective."""
        if closure is not None:
            raise ValueError("An optimizer of a sharded model takes no closure.")
        trained = self._trained()
        for cut in trained:
            cut.gather()
        self.optimizer.step()
        for cut in trained:
            cut.share()

    def _trained(self) -> list[CutParameter]:
        """The parameters that have a gradient on any of the ranks that share them."""
        by_group: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
        for number, cut in enumerate(self.cut):
            for group, _ in cut.cuts:
                by_group[group].append(number)
        present = [int(cut.local.grad is not None) for cut in self.cut]
        for group, numbers in by_group.items():
            bits = torch.tensor([present[number] for number in numbers], dtype=torch.int32)
            bits = bits.to(self.cut[numbers[0]].local.device)
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
            for number, bit in zip(numbers, bits.tolist(), strict=True):
                present[number] = bit
        return [cut for cut, bit in zip(self.cut, present, strict=True) if bit]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the shards, and of parameters that are whole."""
        self.optimizer.zero_grad(set_to_none)
        for cut in self.cut:
            cut.local.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: who updates what is settled when the optimizer is prepared."""
        raise ValueError("Parameters can't be added to an optimizer of a sharded model: add them before training.")

    def state_dict(self) -> dict[str, Any]:
        """The states of what this rank updates."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, at the same layout."""
        self.optimizer.load_state_dict(state_dict)


def cut_parameters(optimizer: Any) -> list[CutParameter]:
    """The parameters of an optimizer, whatever wraps it, that are updated whole while this rank has shards of them."""
    while optimizer is not None and not isinstance(optimizer, WholeParameters):
        optimizer = optimizer.__dict__.get("optimizer")
    return [] if optimizer is None else optimizer.cut
