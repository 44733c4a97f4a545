"""Dropout: other masks on every rank where activations are sharded, the same ones where they are replicated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from optimum_trn.parallel.conv1d import ColumnParallelConv1D, RowParallelConv1D
from optimum_trn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.random import rank_random
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.primitives import Primitive
from optimum_trn.patching.styles import Action, CopiedInput


def draws_random(module: nn.Module) -> bool:
    """Whether a module has dropout that is not switched off: a layer of it, or a rate among its attributes."""
    rates = (
        value
        for inner in module.modules()
        for name, value in vars(inner).items()
        if "drop" in name or (name == "p" and isinstance(inner, nn.modules.dropout._DropoutNd))
    )
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class BlockStream:
    """The random numbers of this rank within the sharded blocks of one layer, one block after the other."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._running: AbstractContextManager[None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockStream:
        return memo.setdefault(id(self), BlockStream(self.group))

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_running": None}

    def start(self, tensor: Tensor) -> None:
        """From here on, numbers are this rank's."""
        self.stop()
        self._running = rank_random(self.group, tensor.device)
        self._running.__enter__()

    def stop(self) -> None:
        """From here on, numbers are those of all ranks again."""
        if self._running is not None:
            running, self._running = self._running, None
            running.__exit__(None, None, None)


class AtBlock:
    """A forward pre-hook where a block enters or, as `leaves` says, where its output is summed."""

    def __init__(self, stream: BlockStream, leaves: bool) -> None:
        self.stream = stream
        self.leaves = leaves

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.leaves:
            self.stream.stop()
        elif module.training:
            self.stream.start(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))


@dataclass(frozen=True)
class OwnMasks:
    """A layer in whose sharded blocks, from where they enter to where they leave, each rank draws its own numbers."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        stream = BlockStream(group)
        for inner in module.modules():
            enters = any(isinstance(hook, CopiedInput) for hook in inner._forward_pre_hooks.values())
            if isinstance(inner, (ColumnParallelLinear, ColumnParallelConv1D)):
                enters = inner.copies_input
            leaves = isinstance(inner, (RowParallelLinear, RowParallelConv1D))
            if enters or leaves:
                inner.register_forward_pre_hook(AtBlock(stream, leaves), with_kwargs=True)

    def revert(self, module: nn.Module) -> None:
        for inner in module.modules():
            for key, hook in list(inner._forward_pre_hooks.items()):
                if isinstance(hook, AtBlock):
                    del inner._forward_pre_hooks[key], inner._forward_pre_hooks_with_kwargs[key]


@dataclass(frozen=True)
class ForkRngInBlocks(Primitive):
    """Draw other random numbers on every rank within the sharded blocks of these layers."""

    def __str__(self) -> str:
        return f'schedule["{self.path}"].fork_rng_in_blocks()'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        return [Action(path, OwnMasks()) for path in paths]
