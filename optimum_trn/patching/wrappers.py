"""Wrappers: styles that put another forward around, or in place of, that of one module, on the instance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from optimum_trn.errors import PlanError
from optimum_trn.parallel.fused import fused_linear
from optimum_trn.parallel.linear import RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.random import rank_random
from optimum_trn.parallel.replicated import RuledForward
from optimum_trn.parallel.sharding import Placement

Forward = Callable[..., Any]


class WrappingForward:
    """A forward on the instance that remembers what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.wrapped: Forward | None = module.__dict__.get("forward")

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would do without this wrapper."""
        return (self.wrapped or type(self.module).forward.__get__(self.module))(*args, **kwargs)

    def parameter(self, name: str) -> Tensor | None:
        """A parameter of the module for one forward pass, its gradient summed over replicas if it has such."""
        parameter = self.module._parameters[name]
        rule = self.wrapped.rules.get(name) if isinstance(self.wrapped, RuledForward) else None
        return parameter if parameter is None or rule is None else rule(parameter)

    def twin(self) -> nn.Module:
        """What shares all with the module but has its parameters for one forward pass, and its stock forward."""
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__["_parameters"] = {name: self.parameter(name) for name in self.module._parameters}
        return twin

    @staticmethod
    def remove(module: nn.Module) -> None:
        """Takes the outermost wrapper off."""
        wrapped = module.__dict__.pop("forward").wrapped
        if wrapped is not None:
            module.forward = wrapped


class Wrapper:
    """What these styles have in common: they cut no parameter, and go away as they came."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {}

    def revert(self, module: nn.Module) -> None:
        WrappingForward.remove(module)


class ReplacedForward(WrappingForward):
    """Calls a function of the module and its inputs."""

    def __init__(self, module: nn.Module, function: Forward) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.twin(), *args, **kwargs)


@dataclass(frozen=True)
class Replaced(Wrapper):
    """A module that computes `function(module, ...)`, on the same parameters."""

    function: Forward

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = ReplacedForward(module, self.function)


class RecomputedForward(WrappingForward):
    """Keeps only its inputs in training, and computes the rest again in the backward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.stock(*args, **kwargs)
        # No cache of keys and values: the second computation would append to it once more.
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        return checkpoint(self.stock, *args, use_reentrant=False, **kwargs)


Part = TypeVar("Part")


def first_part(modules: Sequence[Part], ratio: float) -> Sequence[Part]:
    """The first `ratio` of the modules, rounded up: whoever asks for a part of them gets one at least."""
    return modules[: math.ceil(ratio * len(modules) - 1e-9)]


@dataclass(frozen=True)
class Recomputed(Wrapper):
    """A module whose activations are recomputed; a layer of transformers is asked to do so itself."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        if getattr(module, "gradient_checkpointing", False):
            raise PlanError(f"{type(module).__name__} recomputes its activations already.")
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        if isinstance(module, GradientCheckpointingLayer):
            module._gradient_checkpointing_func = _checkpoint  # type: ignore[assignment]
            module.gradient_checkpointing = True
        else:
            module.forward = RecomputedForward(module)

    def revert(self, module: nn.Module) -> None:
        if isinstance(module, GradientCheckpointingLayer):
            del module._gradient_checkpointing_func, module.gradient_checkpointing
        else:
            WrappingForward.remove(module)


def _checkpoint(function: Forward, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


class RankRandomForward(WrappingForward):
    """Draws random numbers of this rank in training."""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        super().__init__(module)
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if not self.module.training:
            return self.stock(*args, **kwargs)
        with rank_random(self.group, next((tensor.device for tensor in tensors), torch.device("cpu"))):
            return self.stock(*args, **kwargs)


@dataclass(frozen=True)
class RankRandom(Wrapper):
    """A module that sees sharded activations and draws other random numbers on every rank."""

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = RankRandomForward(module, group)


class DecomposedForward(WrappingForward):
    """The stock forward without the bias, and the bias after it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.module, RowParallelLinear):
            return self.stock(*args, **kwargs)  # it adds its bias after the sum of all ranks in any case
        twin = self.twin()
        bias = twin._parameters["bias"]
        twin._parameters["bias"] = None
        return twin.forward(*args, **kwargs) + bias


@dataclass(frozen=True)
class Decomposed(Wrapper):
    """A linear that multiplies first and adds its bias as an operation of its own."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        if not isinstance(module, nn.Linear) or module.bias is None:
            raise PlanError("only a linear with a bias is a product and a sum that can be decomposed.")
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = DecomposedForward(module)


class FusedProduct:
    """One product with the weights of several linears that read the same input; each takes its part of the output."""

    # Between the first and the last of the linears of one forward pass only; no copy of the model takes them along.
    input: Tensor | None = None
    parts: Sequence[Tensor | None] = ()

    def __init__(self) -> None:
        self.members: list[FusedForward] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def part(self, index: int, input: Tensor) -> Tensor:
        """The output of one of the linears."""
        if input is not self.input or self.parts[index] is None:
            self.input, self.parts = input, self._compute(input)
        part = self.parts[index]
        assert part is not None
        self.parts = [None if place == index else other for place, other in enumerate(self.parts)]
        if not any(other is not None for other in self.parts):
            self.input = None
        return part

    def _compute(self, input: Tensor) -> list[Tensor | None]:
        first: Any = self.members[0].module
        if getattr(first, "copies_input", False):
            input = first.group.enter(input)
        names = [name for name in ("weight", "bias") if first._parameters[name] is not None]
        parameters = [[member.module.get_parameter(name) for member in self.members] for name in names]
        through = [[member.parameter(name) for member in self.members] for name in names]
        return [*fused_linear(input, parameters, through)]  # type: ignore[arg-type]


class FusedForward(WrappingForward):
    """One of the linears of a fused product."""

    def __init__(self, module: nn.Module, product: FusedProduct, index: int) -> None:
        super().__init__(module)
        self.product = product
        self.index = index

    def __call__(self, input: Tensor) -> Tensor:
        return self.product.part(self.index, input)


@dataclass(frozen=True)
class Fused(Wrapper):
    """A module whose named linears, which read the same input, make one product.

    Their parameters stay what they are, by name and shape, but lie in one piece of memory.
    """

    linears: tuple[str, ...]

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        parts = [module.get_submodule(name) for name in self.linears]
        if len(parts) < 2 or any(type(part) is not nn.Linear for part in parts):
            raise PlanError(f"what is fused are at least two of Linear, not {[type(part).__name__ for part in parts]}.")
        inputs = {(part.in_features, part.bias is None) for part in parts if isinstance(part, nn.Linear)}
        if len(inputs) > 1:
            raise PlanError(f"{', '.join(self.linears)} differ in their input features, or in having a bias.")
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        product = FusedProduct()
        for index, name in enumerate(self.linears):
            linear = module.get_submodule(name)
            linear.forward = FusedForward(linear, product, index)
            product.members.append(linear.forward)

    def revert(self, module: nn.Module) -> None:
        for name in self.linears:
            WrappingForward.remove(module.get_submodule(name))
