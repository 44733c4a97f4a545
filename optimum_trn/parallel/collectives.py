"""Collectives with the right gradient: what enters, and what leaves, a region that is sharded over a process group.

The conjugate pairs f and g of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).  All of them are pure:
autograd may still hold what they are given, so none writes in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.parallel.sharding import Placement


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    tensor = tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, tensor, group=group)
    return torch.cat(shards, dim=dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, tensor.shape[dim]
        return _all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = ctx.group.rank() * ctx.length
        return grads[0].narrow(ctx.dim, start, ctx.length).contiguous(), None, None


def copy_to_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A replicated tensor enters a sharded region: identity forward, all-reduce of the partial gradients backward."""
    result: Tensor = _Copy.apply(tensor, group)
    return result


def reduce_from_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums leave a sharded region: all-reduce forward, identity backward."""
    result: Tensor = _Reduce.apply(tensor, group)
    return result


def gather_from_group(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Shards of equal shape leave a sharded region: concatenated along `dim` forward, the own slice backward.

    The gradient is right when all ranks go on to compute the same thing, so that each holds the whole gradient.
    """
    result: Tensor = _Gather.apply(tensor, group, dim)
    return result


def unshard_from_group(local: Tensor, placement: Placement, group: dist.ProcessGroup | None) -> Tensor:
    """The global tensor on every rank of `group`, from this rank's, which lies as `placement` says; no gradient."""
    if placement.dim is None:
        return local.detach()
    if local.is_meta:
        return local.new_empty(placement.global_shape)
    local = local.detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(placement.num_ranks)]
    dist.all_gather(shards, local, group=group)
    return placement.unshard(shards)
