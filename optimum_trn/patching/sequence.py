"""Sequence parallelism of a stack of decoder layers, on top of the styles that cut their blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.conv1d import ColumnParallelConv1D, RowParallelConv1D
from optimum_trn.parallel.experts import ShardedExperts
from optimum_trn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.replicated import SummedGradientForward
from optimum_trn.parallel.sequence import SequenceGroup, SequenceLength
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.dropout import draws_random
from optimum_trn.patching.primitives import Primitive
from optimum_trn.patching.styles import Action, CopiedInput, SharedInput, Style
from optimum_trn.patching.wrappers import RankRandomForward

Columns = (ColumnParallelLinear, ColumnParallelConv1D)
Linears = (*Columns, RowParallelLinear, RowParallelConv1D)


class AtBoundary:
    """A hook on the first input or output of a module, through which it passes into or out of sequence shards."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group


class ScatterInput(AtBoundary):
    """A forward pre-hook: a whole tensor is cut; its length is the one that the model computes with from now on."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name, value = _first_input(module, args, kwargs)
        self.group.length.value = value.shape[1]
        return _with_input(args, kwargs, name, self.group.scatter(value))


class GatherInput(AtBoundary):
    """A forward pre-hook: runs become a whole tensor."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name, value = _first_input(module, args, kwargs)
        return _with_input(args, kwargs, name, self.group.gather(value))


class GatherOutput(AtBoundary):
    """A forward hook: runs become a whole tensor."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (self.group.gather(output[0]), *output[1:]) if isinstance(output, tuple) else self.group.gather(output)


class ScatterOutput(AtBoundary):
    """A forward hook: a whole tensor is cut."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (self.group.scatter(output[0]), *output[1:]) if isinstance(output, tuple) else self.group.scatter(output)


def _first_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, Tensor]:
    if args:
        return None, args[0]
    name = list(inspect.signature(type(module).forward).parameters)[1]
    return name, kwargs[name]


def _with_input(args: Any, kwargs: dict[str, Any], name: str | None, value: Tensor) -> tuple[Any, dict[str, Any]]:
    return ((value, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: value})


@dataclass(frozen=True)
class SequenceSharded:
    """A decoder layer between whose blocks each rank holds a run of the sequence; the first layer cuts, the last
    gathers.

    Modules outside the sharded blocks see runs: the gradients of their weights are summed.  Where a block enters, all
    tokens are gathered, and where it leaves, their sum is scattered, where before they were copied and reduced.
    """

    length: SequenceLength
    first: bool
    last: bool

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise PlanError(
                f"{type(module).__name__} has the parameters {own} of its own: no sequence parallelism yet."
            )
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        sequence = SequenceGroup(group.process_group, self.length)
        for child in module.children():
            _share_sequence(child, sequence)
        if draws_random(module):
            module.forward = RankRandomForward(module, group)
        if self.first:
            module.register_forward_pre_hook(ScatterInput(sequence), with_kwargs=True, prepend=True)
        if self.last:
            module.register_forward_hook(GatherOutput(sequence), prepend=True)

    def revert(self, module: nn.Module) -> None:
        if isinstance(module.__dict__.get("forward"), RankRandomForward):
            RankRandomForward.remove(module)
        for inner in module.modules():
            if isinstance(inner, Linears) and isinstance(inner.group, SequenceGroup):
                inner.group = RankGroup(inner.group.process_group)
            if isinstance(getattr(inner.__dict__.get("forward"), "group", None), SequenceGroup):
                del inner.forward
            _remove_hooks(inner)


class SummedOverRuns(SummedGradientForward):
    """The forward of a module that sees runs of the sequence."""

    def __init__(self, module: nn.Module, group: SequenceGroup) -> None:
        super().__init__(module, group)
        self.group = group


def _share_sequence(child: nn.Module, group: SequenceGroup) -> None:
    inner = list(child.modules())
    linears = [module for module in inner if isinstance(module, Linears)]
    if any(isinstance(module.__dict__.get("forward"), ShardedExperts) for module in inner):
        # A router and experts read the same tokens, and what they give is whole before it leaves.
        child.register_forward_pre_hook(GatherInput(group), with_kwargs=True)
        child.register_forward_hook(ScatterOutput(group))
        return
    blocks = []
    for module in inner:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, CopiedInput):
                hook.group = group
                blocks.append(module)
    columns = [linear for linear in linears if isinstance(linear, Columns)]
    if columns and not blocks and not isinstance(child, Linears):
        # Stock forwards read shapes off their input, which must be that of all tokens from the start.
        for column in columns:
            column.copies_input = False
        child.register_forward_pre_hook(EnterHere(group), with_kwargs=True)
        blocks.append(child)
    for linear in linears:
        linear.group = group
    whole = {id(module) for block in blocks for module in block.modules()} | set(map(id, linears))
    for module in inner:
        if id(module) not in whole and any(True for _ in module.parameters(recurse=False)):
            module.forward = SummedOverRuns(module, group)


class EnterHere(AtBoundary):
    """A forward pre-hook: the one input of a block enters it here instead of in its first linear."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name, value = _first_input(module, args, kwargs)
        return _with_input(args, kwargs, name, self.group.enter(value))


def _remove_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, CopiedInput) and isinstance(hook.group, SequenceGroup):
                hook.group = RankGroup(hook.group.process_group)
            elif isinstance(hook, AtBoundary):
                if isinstance(hook, EnterHere):
                    for column in module.modules():
                        if isinstance(column, Columns):
                            column.copies_input = True
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclass(frozen=True)
class SequenceParallel(Primitive):
    """Share the activations between the sharded blocks of these layers, which follow each other, among the ranks."""

    def __str__(self) -> str:
        return f'schedule["{self.path}"].sequence_parallel()'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        length, last = SequenceLength(), len(paths) - 1
        return [Action(path, SequenceSharded(length, index == 0, index == last)) for index, path in enumerate(paths)]

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        for path, _ in actions:
            inner = [style for other, own in styles.items() if other.startswith(f"{path}.") for style in own]
            if not inner:
                raise PlanError(f"{path}: nothing in it is sharded, so that its sequence cannot be.")
            if any(isinstance(style, SharedInput) and style.argument is not None for style in inner):
                raise PlanError(f"{path}: it attends to more than its own sequence, which cannot be cut with it.")


def sequence_of(actions: Sequence[Action], group: RankGroup) -> SequenceGroup | None:
    """The group over which the actions share the sequence, if they do."""
    lengths: Iterator[SequenceLength] = (style.length for _, style in actions if isinstance(style, SequenceSharded))
    length = next(lengths, None)
    return None if length is None else SequenceGroup(group.process_group, length)
