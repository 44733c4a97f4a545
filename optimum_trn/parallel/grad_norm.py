"""The global gradient norm of a sharded model, in which every parameter counts exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.parallel.sharding import Placement


@torch.no_grad()
def grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    placements: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of all gradients together, equal on all ranks of `group`: a scalar in float32 (float64 if they are).

    A piece of a shard counts on every rank that holds it, divided by their number; padding and what a replicated
    parameter has on other ranks do not count.
    `named_parameters` must list tied parameters once, as `Module.named_parameters` does.  One collective.
    """
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    rank = 0 if group is None else dist.get_rank(group)
    for name, parameter in named_parameters:
        if parameter.grad is None:
            continue
        grad = parameter.grad.detach()
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        placement = placements.get(name)
        if group is None or placement is None or placement.dim is None:
            replicated.append(torch.linalg.vector_norm(grad, norm_type, dtype=dtype))
            continue
        sharded.append(grad.new_zeros((), dtype=dtype))  # a rank may hold nothing but padding
        for offset, length, ranks in placement.segments(rank):
            if ranks:
                norm = torch.linalg.vector_norm(grad.narrow(placement.dim, offset, length), norm_type, dtype=dtype)
                replicas = len(ranks)
                sharded.append(norm if math.isinf(norm_type) or replicas == 1 else norm / replicas ** (1 / norm_type))
    if not sharded and not replicated:
        return torch.tensor(0.0)

    norms = sharded + replicated
    local = torch.linalg.vector_norm(torch.stack(sharded), norm_type) if sharded else torch.zeros_like(norms[0])
    if group is not None:
        if math.isinf(norm_type):
            dist.all_reduce(local, op=dist.ReduceOp.MAX, group=group)
        else:
            local = local.pow(norm_type)
            dist.all_reduce(local, group=group)
            local = local.pow(1 / norm_type)
    return torch.linalg.vector_norm(torch.stack([local, *replicated]), norm_type)


@torch.no_grad()
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
    named = list(named_parameters)
    total = grad_norm(named, placements, group, norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, parameter in named:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return total
