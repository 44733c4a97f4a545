"""Styles: what happens to one module of a stock model when it is patched, and where its parameters lie."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from torch import nn
from transformers.pytorch_utils import Conv1D

from optimum_trn.errors import PlanError
from optimum_trn.parallel.conv1d import ColumnParallelConv1D, RowParallelConv1D
from optimum_trn.parallel.cuts import Block
from optimum_trn.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from optimum_trn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.replicated import SummedGradientForward
from optimum_trn.parallel.sharding import Placement


@runtime_checkable
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


# Not isinstance: a subclass has a forward of its own, which the change of class would drop silently.  These compute
# what their base class does.
SAME_FORWARD = {"FalconLinear": nn.Linear}


def _expect(module: nn.Module, style: Style, *stock: type[nn.Module]) -> None:
    if SAME_FORWARD.get(type(module).__name__, type(module)) not in stock:
        raise PlanError(f"{type(style).__name__} is for {stock[0].__name__}, not for {type(module).__name__}.")


M = TypeVar("M", bound=nn.Module)


def _become(module: nn.Module, cls: type[M]) -> M:
    """The same instance, with its hooks and parameters, of another class; it remembers its stock class."""
    module.stock_class = type(module)  # type: ignore[assignment]
    module.__class__ = cls
    return cast(M, module)


def _become_stock(module: nn.Module, *attributes: str) -> None:
    """The same instance, of its stock class, without the attributes that only the parallel class has."""
    for name in ("group", *attributes):
        delattr(module, name)
    module.__class__ = module.__dict__.pop("stock_class")


def weight_dims(linear: nn.Module) -> tuple[int, int]:
    """The dimensions of output and of input features of the weight of a linear layer."""
    return (1, 0) if isinstance(linear, Conv1D) else (0, 1)


def _linear_placements(
    module: nn.Module, num_ranks: int, dim: int, blocks: tuple[Block, ...] = ()
) -> dict[str, Placement]:
    assert isinstance(module, (nn.Linear, Conv1D))
    placements = {"weight": Placement.split(module.weight.shape, num_ranks, dim, blocks)}
    if module.bias is not None:
        shape = module.bias.shape
        cut = dim == weight_dims(module)[0]
        placements["bias"] = (
            Placement.split(shape, num_ranks, 0, blocks) if cut else Placement.replicate(shape, num_ranks)
        )
    return placements


@dataclass(frozen=True)
class ColumnWise:
    """A linear layer cut by output features; `copies_input` where no block does it for several such layers.

    Its output features consist of consecutive `blocks` that are each cut, or of one.
    """

    copies_input: bool = False
    blocks: tuple[Block, ...] = ()

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, self, nn.Linear, Conv1D)
        return _linear_placements(module, num_ranks, weight_dims(module)[0], self.blocks)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        cls = ColumnParallelConv1D if isinstance(module, Conv1D) else ColumnParallelLinear
        column: Any = _become(module, cls)
        column.group, column.copies_input = group, self.copies_input

    def revert(self, module: nn.Module) -> None:
        _become_stock(module, "copies_input")


@dataclass(frozen=True)
class RowWise:
    """A linear layer cut by input features, whose partial outputs are summed; the bias stays whole.

    Its input features consist of consecutive `blocks` that are each cut, or of one.
    """

    blocks: tuple[Block, ...] = ()

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, self, nn.Linear, Conv1D)
        return _linear_placements(module, num_ranks, weight_dims(module)[1], self.blocks)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        row: Any = _become(module, RowParallelConv1D if isinstance(module, Conv1D) else RowParallelLinear)
        row.group = group

    def revert(self, module: nn.Module) -> None:
        _become_stock(module)


@dataclass(frozen=True)
class VocabParallel:
    """An `nn.Embedding` cut along the vocabulary, or a subclass that does something to the output of its forward."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        if not isinstance(module, nn.Embedding):
            raise PlanError(f"VocabParallel is for embeddings, not for {type(module).__name__}.")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise PlanError("an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut.")
        return {"weight": Placement.split(module.weight.shape, num_ranks, 0)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        assert isinstance(module, nn.Embedding)
        module = _become(module, vocab_parallel_class(type(module)))
        module.group, module.vocab_start = group, group.rank * module.weight.shape[0]

    def revert(self, module: nn.Module) -> None:
        _become_stock(module, "vocab_start")


def vocab_parallel_class(stock: type[nn.Embedding]) -> type[VocabParallelEmbedding]:
    """The forward of a subclass of `nn.Embedding` whose super() is the parallel look-up."""
    if stock is nn.Embedding:
        return VocabParallelEmbedding
    if "super" not in stock.forward.__code__.co_names:
        raise PlanError(f"the forward of {stock.__name__} is its own, so that its vocabulary cannot be cut.")

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _new_vocab_parallel, (stock,), self.__dict__

    # A class that is made here cannot be found by its name: its instances are pickled by the class it is made from.
    return type(f"VocabParallel{stock.__name__}", (stock, VocabParallelEmbedding), {"__reduce_ex__": reduce})


def _new_vocab_parallel(stock: type[nn.Embedding]) -> nn.Module:
    cls = vocab_parallel_class(stock)
    return cls.__new__(cls)


@dataclass(frozen=True)
class HoldsName:
    """A module that only holds another name of a parameter which a vocabulary-parallel head cuts, such as its bias."""

    parameter: str

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {self.parameter: Placement.split(module.get_parameter(self.parameter).shape, num_ranks, 0)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        """It does not compute with the parameter."""

    def revert(self, module: nn.Module) -> None:
        """Nothing was changed."""


@dataclass(frozen=True)
class VocabParallelHead:
    """The `nn.Linear` that makes logits, cut along the vocabulary."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        _expect(module, self, nn.Linear)
        return _linear_placements(module, num_ranks, dim=0)

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module = _become(module, ParallelLMHead)
        module.group, module.copies_input, module.gathers_output = group, True, True

    def revert(self, module: nn.Module) -> None:
        _become_stock(module, "copies_input", "gathers_output")


@dataclass(frozen=True)
class SummedGradients:
    """A replicated module that sees sharded activations: the gradients of its own parameters are summed.

    Only of those with `names`, if there are any.
    """

    names: tuple[str, ...] = ()

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        if not self.names and any(True for child in module.children() for _ in child.parameters()):
            raise PlanError(f"SummedGradients is for a module that owns its parameters, not {type(module).__name__}.")
        return {
            name: Placement.replicate(parameter.shape, num_ranks)
            for name, parameter in module.named_parameters(recurse=False)
            if name in self.names or not self.names
        }

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        if "forward" in module.__dict__:
            raise PlanError(f"the forward of {type(module).__name__} was replaced on the instance before patching.")
        module.forward = SummedGradientForward(module, group, self.names)

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
        if self.name in kwargs:
            value = kwargs[self.name]
            return args, kwargs if value is None else {**kwargs, self.name: self.group.enter(value)}
        position = self.position
        if position >= len(args) or args[position] is None:
            return args, kwargs  # a cross-attention without encoder states attends to the tokens themselves
        return (*args[:position], self.group.enter(args[position]), *args[position + 1 :]), kwargs


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
