"""Low-rank adapters of sharded linear layers: y = base(x) + B A x * scaling (Hu et al. 2021, arXiv:2106.09685).

Both factors are whole on every rank, which computes with the part that belongs to its shard of the base layer; their
gradients are summed over the ranks inside the backward pass, so that the copies stay equal.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import copy_to_group
from optimum_trn.parallel.conv1d import RowParallelConv1D
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.linear import RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.random import common_random, rank_random
from optimum_trn.parallel.sequence import SequenceGroup
from optimum_trn.parallel.sharding import Placement


class _OwnPart(torch.autograd.Function):
    """The part of a whole parameter that one rank computes with; the gradient is that of all parts, on all ranks.

    Not made of views: a rank that has nothing but padding must take part in the sum of the gradient as well.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, placement: Placement, group: RankGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        return placement.shard(parameter, group.rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        placement, group = ctx.placement, ctx.group
        whole, offset = grads[0].new_zeros(placement.global_shape), 0
        for start, length in placement.pieces(group.rank):
            if start is not None:
                whole.narrow(placement.dim, start, length).add_(grads[0].narrow(placement.dim, offset, length))
            offset += length
        dist.all_reduce(whole, group=group.process_group)
        return whole, None, None


class RefusedMixedBatch:
    """Stands for PEFT's forward with an adapter for each row, which visits them in another order on every rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError(
            f"{self.path}: adapter_names is not supported on a layer that is sharded. Choose one adapter for the batch "
            "with set_adapter."
        )


class FactorForward:
    """The forward of one factor, an `nn.Linear` whose weight lies in the base layer as `placement` says.

    The group is read from the base layer: with sequence parallelism it is one whose ranks hold runs of the sequence.
    """

    def __init__(self, factor: nn.Linear, base: Any, placement: Placement) -> None:
        self.factor = factor
        self.base = base
        self.placement = placement

    def summed(self, parameter: Tensor) -> Tensor:
        """The whole parameter; every rank adds its part to the gradient."""
        return copy_to_group(parameter, self.base.group.process_group)

    def own_part(self, parameter: Tensor, dim: int) -> Tensor:
        """This rank's part of the parameter along `dim`, with zeros where its shard of the base layer is padding."""
        placement = Placement(tuple(parameter.shape), self.placement.num_ranks, dim, self.placement.ranges)
        part: Tensor = _OwnPart.apply(parameter, placement, self.base.group)
        return part


class ColumnFactorA(FactorForward):
    """A (rank, in_features) of a column-parallel layer: reads what the base layer reads."""

    def __call__(self, input: Tensor) -> Tensor:
        # Where the input has entered the sharded block already, what comes back is a partial gradient.
        weight = self.factor.weight
        return F.linear(input, self.base.group.parameter(weight) if self.base.copies_input else self.summed(weight))


class ColumnFactorB(FactorForward):
    """B (out_features, rank) of a column-parallel layer: computes this rank's output features."""

    def __call__(self, input: Tensor) -> Tensor:
        if self.base.copies_input:
            input = self.base.group.enter(input)
        bias = None if self.factor.bias is None else self.own_part(self.factor.bias, 0)
        output = F.linear(input, self.own_part(self.factor.weight, 0), bias)
        return self.base.output(output) if isinstance(self.base, ParallelLMHead) else output


class RowFactorA(FactorForward):
    """A (rank, in_features) of a row-parallel layer: the few features of its output are summed over the ranks."""

    def __call__(self, input: Tensor) -> Tensor:
        output: Tensor = self.base.group.leave(F.linear(input, self.own_part(self.factor.weight, 1)))
        return output


class RowFactorB(FactorForward):
    """B (out_features, rank) of a row-parallel layer: computes outside of the sharded block."""

    def __call__(self, input: Tensor) -> Tensor:
        bias = None if self.factor.bias is None else self.base.group.parameter(self.factor.bias)
        return F.linear(input, self.base.group.parameter(self.factor.weight), bias)


class AdapterDropout:
    """The forward of the dropout before A: the same mask on all ranks where the input is, else one for each rank."""

    def __init__(self, module: nn.Module, base: Any) -> None:
        self.module = module
        self.base = base

    def __call__(self, input: Tensor) -> Any:
        stock = type(self.module).forward.__get__(self.module)
        if not self.module.training:
            return stock(input)
        own = isinstance(self.base, (RowParallelLinear, RowParallelConv1D))  # features, or else tokens
        own = own or (isinstance(self.base.group, SequenceGroup) and self.base.copies_input)
        with rank_random(self.base.group, input.device) if own else common_random(input.device):
            return stock(input)


class LocalDelta:
    """`get_delta_weight` of an adapted layer: what merging adds to this rank's shard of the base layer's weight."""

    def __init__(self, layer: Any, placement: Placement) -> None:
        self.layer = layer
        self.placement = placement

    @torch.no_grad()
    def __call__(self, adapter: str) -> Tensor:
        whole = type(self.layer).get_delta_weight(self.layer, adapter)
        return self.placement.shard(whole, self.layer.get_base_layer().group.rank)
