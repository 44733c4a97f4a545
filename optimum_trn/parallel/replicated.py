"""Modules whose own parameters need more of their gradients than one rank sees, or less: replicas, and zero padding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.parallel.collectives import copy_to_group
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sharding import Placement


class GradientRule(Protocol):
    """A view of a parameter for one forward pass, through which its gradient comes back as it should be."""

    def __call__(self, parameter: Tensor) -> Tensor: ...


class RuledForward:
    """The forward of one module instance, with the gradients of its own parameters corrected by name.

    The correction has to happen inside the backward pass: done on `Parameter.grad` it would, under gradient
    accumulation, sum again what earlier micro-batches have summed already.
    """

    def __init__(self, module: nn.Module, rules: Mapping[str, GradientRule]) -> None:
        self.module = module
        self.rules = dict(rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The stock forward runs on a twin that shares all but the parameters; the module, its names and the identity of
        # its parameters stay as they are.
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        parameters = dict(self.module._parameters)
        for name, rule in self.rules.items():
            parameter = parameters[name]
            parameters[name] = None if parameter is None else rule(parameter)  # type: ignore[assignment]
        twin.__dict__["_parameters"] = parameters
        return twin.forward(*args, **kwargs)


class SummedGradient:
    """For a parameter that is whole on all ranks of a group, each of which sees other activations."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def __call__(self, parameter: Tensor) -> Tensor:
        return copy_to_group(parameter, self.group.process_group)


class SummedGradientForward(RuledForward):
    """The forward of a replicated module that sees sharded activations, such as a norm of each attention head."""

    def __init__(self, module: nn.Module, group: RankGroup, names: Sequence[str] = ()) -> None:
        super().__init__(module, dict.fromkeys(names or module._parameters, SummedGradient(group)))


class ShardGradient:
    """For a shard of which `replicas` holds parts as well, or which has padding that computes with real values.

    The parts are summed over the ranks that hold them, so that these stay equal; the gradient of padding is zero.
    """

    def __init__(self, placement: Placement, rank: int, replicas: RankGroup | None) -> None:
        assert placement.dim is not None
        self.dim = placement.dim
        self.replicas = replicas
        segments = placement.segments(rank)
        self.shared = [(offset, length) for offset, length, ranks in segments if len(ranks) > 1]
        self.padding = [(offset, length) for offset, length, ranks in segments if not ranks]

    def __call__(self, parameter: Tensor) -> Tensor:
        result: Tensor = _CorrectGradient.apply(parameter, self)
        return result


class _CorrectGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rule: ShardGradient) -> Tensor:
        ctx.rule = rule
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rule: ShardGradient = ctx.rule
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        if rule.shared and rule.replicas is not None:
            parts = [grad.narrow(rule.dim, offset, length) for offset, length in rule.shared]
            total = torch.cat(parts, dim=rule.dim)
            dist.all_reduce(total, group=rule.replicas.process_group)
            for part, summed in zip(parts, total.split([length for _, length in rule.shared], rule.dim), strict=True):
                part.copy_(summed)
        for offset, length in rule.padding:
            grad.narrow(rule.dim, offset, length).zero_()
        return grad, None
