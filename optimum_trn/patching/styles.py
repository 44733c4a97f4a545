"""Styles: what happens to one module of a stock model when it is patched, and where its parameters lie."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import copy_to_group
from optimum_trn.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from optimum_trn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.replicated import SummedGradientForward
from optimum_trn.parallel.sharding import Placement


class Style(Protocol):
    """How one module is patched, on the instance, so that hooks, references and tied parameters survive."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        """Where the module's own parameters lie, by name; `PlanError` if the module is not what the style is for."""

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        """Gives the instance its parallel forward; its parameters are cut by the caller."""

    def revert(self, module: nn.Module) -> None:
        """Makes the instance stock again; its parameters are whole again already."""


class Action(NamedTuple):
    """One style for one module, by its path."""

    path: str
    style: Style


def _expect(module: nn.Module, stock: type[nn.Module], style: Style) -> None:
    # Not isinstance: a subclass has a forward of its own, which the change of class would drop silently.
    if type(module) is not stock:
        raise PlanError(f"{type(style).__name__} is for {stock.__name__}, not for {type(module).__name__}.")


M = TypeVar("M", bound=nn.Module)


def _become(module: nn.Module, cls: type[M]) -> M:
    """The same instance, with its hooks and parameters, of another class."""
    module.__class__ = cls
    return cast(M, module)


def _linear_placements(module: nn.Module, num_ranks: int, dim: int) -> dict[str, Placement]:
    assert isinstance(module, nn.Linear)
    placements = {"weight": Placement.split(module.weight.shape, num_ranks, dim)}
    if module.bias is not None:
        shape = module.bias.shape
        placements["bias"] = Placement.split(shape, num_ranks, 0) if dim == 0 else Placement.replicate(shape, num_ranks)
    return placements


@dataclass(frozen=True)
class ColumnWise:
    """An `nn.Linear` cut by output features; `copies_input` where no block does it for several such layers."""

    copies_input: bool = False

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, nn.Linear, self)
        return _linear_placements(module, num_ranks, dim=0)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module = _become(module, ColumnParallelLinear)
        module.group, module.copies_input = group, self.copies_input
        module.out_features = module.weight.shape[0]

    def revert(self, module: nn.Module) -> None:
        assert isinstance(module, ColumnParallelLinear)
        del module.group, module.copies_input
        _become(module, nn.Linear).out_features = module.weight.shape[0]


@dataclass(frozen=True)
class RowWise:
    """An `nn.Linear` cut by input features, whose partial outputs are summed; the bias stays whole."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, nn.Linear, self)
        return _linear_placements(module, num_ranks, dim=1)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module = _become(module, RowParallelLinear)
        module.group = group
        module.in_features = module.weight.shape[1]

    def revert(self, module: nn.Module) -> None:
        assert isinstance(module, RowParallelLinear)
        del module.group
        _become(module, nn.Linear).in_features = module.weight.shape[1]


@dataclass(frozen=True)
class VocabParallel:
    """An `nn.Embedding` cut along the vocabulary."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, nn.Embedding, self)
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise PlanError("an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut.")
        return {"weight": Placement.split(module.weight.shape, num_ranks, 0)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module = _become(module, VocabParallelEmbedding)
        module.group, module.vocab_size, module.stock_padding_idx = group, module.num_embeddings, module.padding_idx
        module.num_embeddings = module.weight.shape[0]
        module.vocab_start = group.rank * module.num_embeddings
        if module.padding_idx is not None:
            local = module.padding_idx - module.vocab_start
            module.padding_idx = local if 0 <= local < module.num_embeddings else None

    def revert(self, module: nn.Module) -> None:
        assert isinstance(module, VocabParallelEmbedding)
        module.num_embeddings, module.padding_idx = module.vocab_size, module.stock_padding_idx
        del module.group, module.vocab_size, module.vocab_start, module.stock_padding_idx
        _become(module, nn.Embedding)


@dataclass(frozen=True)
class VocabParallelHead:
    """The `nn.Linear` that makes logits, cut along the vocabulary."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, nn.Linear, self)
        return _linear_placements(module, num_ranks, dim=0)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module = _become(module, ParallelLMHead)
        module.group, module.copies_input, module.gathers_output = group, True, True
        module.out_features = module.weight.shape[0]

    def revert(self, module: nn.Module) -> None:
        assert isinstance(module, ParallelLMHead)
        del module.group, module.copies_input, module.gathers_output
        _become(module, nn.Linear).out_features = module.weight.shape[0]


@dataclass(frozen=True)
class SummedGradients:
    """A replicated module that sees sharded activations: the gradients of its own parameters are summed."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        if any(True for child in module.children() for _ in child.parameters()):
            raise PlanError(f"SummedGradients is for a module that owns its parameters, not {type(module).__name__}.")
        return {
            name: Placement.replicate(parameter.shape, num_ranks)
            for name, parameter in module.named_parameters(recurse=False)
        }

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        if "forward" in module.__dict__:
            raise PlanError(f"the forward of {type(module).__name__} was replaced on the instance before patching.")
        module.forward = SummedGradientForward(module, group)

    def revert(self, module: nn.Module) -> None:
        del module.forward


class CopiedInput:
    """A forward pre-hook: one tensor enters the sharded layers of a block through one copy."""

    def __init__(self, name: str, position: int, group: RankGroup) -> None:
        self.name = name
        self.position = position
        self.group = group

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        process_group = self.group.process_group
        if self.name in kwargs:
            return args, {**kwargs, self.name: copy_to_group(kwargs[self.name], process_group)}
        position = self.position
        return (*args[:position], copy_to_group(args[position], process_group), *args[position + 1 :]), kwargs


@dataclass(frozen=True)
class SharedInput:
    """A block whose column-wise layers read one argument of its forward, the first unless `argument` names it."""

    argument: str | None = None

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        name = self.argument or names[0]
        if name not in names:
            raise PlanError(f"the forward of {type(module).__name__} has no argument {name!r}, only {names}.")
        module.register_forward_pre_hook(CopiedInput(name, names.index(name), group), with_kwargs=True)

    def revert(self, module: nn.Module) -> None:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, CopiedInput):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
