"""The global gradient norm of a sharded model, in which every parameter counts exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.device import device_type
from optimum_trn.parallel.sharding import Placement


class Gradient(NamedTuple):
    """The gradient of a parameter on this rank; of a run of its flattened elements from `start`, unless that is None.

    `name` and `shape` are the parameter's, shape as it is on this rank.
    """

    name: str
    grad: Tensor
    shape: tuple[int, ...]
    start: int | None = None

    def narrow(self, dim: int, offset: int, length: int) -> Tensor:
        """A slice of the parameter's gradient; where this rank has no gradient, it is zero."""
        if self.start is None:
            return self.grad.narrow(dim, offset, length)
        whole = self.grad.new_zeros(math.prod(self.shape))
        whole.narrow(0, self.start, self.grad.numel()).copy_(self.grad.reshape(-1))
        return whole.view(self.shape).narrow(dim, offset, length)


def gradients_of(named_parameters: Iterable[tuple[str, Tensor]]) -> list[Gradient]:
    """The whole gradients of parameters that have one."""
    return [
        Gradient(name, parameter.grad.detach(), tuple(parameter.shape))
        for name, parameter in named_parameters
        if parameter.grad is not None
    ]


@torch.no_grad()
def total_norm(
    gradients: Iterable[Gradient],
    placements: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
    norm_type: float = 2.0,
    partition_groups: Sequence[dist.ProcessGroup] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The norm of all gradients together, equal on all ranks: a scalar in float32 (float64 if they are).

    Over `group` the parameters lie as `placements` say: a piece of a shard counts on every rank that holds it, divided
    by their number; padding and what a replicated parameter has on other ranks do not count.  The ranks of each of
    `partition_groups` hold different gradients, which all count; `dtype` is what a rank that has none adds its zero in.
    One collective for each group.
    """
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    rank = 0 if group is None else dist.get_rank(group)
    for gradient in gradients:
        grad = gradient.grad
        dtype = torch.float64 if torch.float64 in (dtype, grad.dtype) else torch.float32
        placement = placements.get(gradient.name)
        if group is None or placement is None or placement.dim is None:
            replicated.append(torch.linalg.vector_norm(grad, norm_type, dtype=dtype))
            continue
        segments = placement.segments(rank)
        if all(len(ranks) == 1 for *_, ranks in segments):
            sharded.append(torch.linalg.vector_norm(grad, norm_type, dtype=dtype))
            continue
        sharded.append(grad.new_zeros((), dtype=dtype))  # a rank may hold nothing but padding
        for offset, length, ranks in segments:
            if ranks:
                norm = torch.linalg.vector_norm(gradient.narrow(placement.dim, offset, length), norm_type, dtype=dtype)
                replicas = len(ranks)
                sharded.append(norm if math.isinf(norm_type) or replicas == 1 else norm / replicas ** (1 / norm_type))
    norms = sharded + replicated
    if not norms and not partition_groups:
        return torch.tensor(0.0)
    like = norms[0] if norms else torch.zeros((), dtype=dtype, device=torch.device(device_type()))
    # Powers of norms add up where norms do not; the largest of largest elements is the largest.
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    sums = torch.stack([_together(part, norm_type, like) for part in (sharded, replicated)])
    for partition in partition_groups:
        dist.all_reduce(sums, op=op, group=partition)
    if group is not None:
        dist.all_reduce(sums[:1], op=op, group=group)
    return sums.max() if math.isinf(norm_type) else sums.sum().pow(1 / norm_type)


def _together(norms: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """The sum of the powers of norms, or the largest."""
    if not norms:
        return torch.zeros_like(like)
    norm = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


def grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    placements: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
    norm_type: float = 2.0,
) -> Tensor:
    """`total_norm` of the whole gradients of `named_parameters`, which must list tied parameters once."""
    return total_norm(gradients_of(named_parameters), placements, group, norm_type)


@torch.no_grad()
def clip_(gradients: Iterable[Gradient], total: Tensor, max_norm: float) -> None:
    """Scales gradients of norm `total` so that it is at most `max_norm`: torch.nn.utils.clip_grads_with_norm_."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.grad.mul_(scale.to(gradient.grad.device))


def clip_grad_norm_(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    placements: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

    The same formula as `torch.nn.utils.clip_grad_norm_`, which would take each rank's own norm.
    """
    gradients = gradients_of(named_parameters)
    total = total_norm(gradients, placements, group, norm_type)
    clip_(gradients, total, max_norm)
    return total
