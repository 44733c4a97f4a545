"""Styles for modules of any kind in a sharded region: cut as they are, entered by several inputs, or of local width."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from optimum_trn.parallel.cut_forward import CutForward
from optimum_trn.parallel.cuts import Block
from optimum_trn.parallel.gathered_norm import GatheredNorm
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.wrappers import Wrapper, WrappingForward

FEATURES = ("in_features", "out_features", "in_channels", "out_channels", "groups", "num_features", "embedding_dim")
"""Numbers of stock layers that follow the sizes of their parameters."""


@dataclass(frozen=True)
class CutModule:
    """A module whose stock forward also computes with parts of its parameters: `cuts` are (name, dim, blocks).

    A cut name may be that of a buffer.  `enters` and `leaves` say whether its input is whole and its output partial;
    `added_once` are its parameters that every rank holds whole, such as a bias that is added to a partial output.
    """

    cuts: tuple[tuple[str, int, tuple[Block, ...]], ...]
    enters: bool = False
    leaves: bool = False
    added_once: tuple[str, ...] = ()

    def _every(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {
            name: Placement.split(getattr(module, name).shape, num_ranks, dim, blocks)
            for name, dim, blocks in self.cuts
        }

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        own = {name for name, _ in module.named_parameters(recurse=False)}
        every = {name: placement for name, placement in self._every(module, num_ranks).items() if name in own}
        for name in self.added_once:
            every[name] = Placement.replicate(module.get_parameter(name).shape, num_ranks)
        return every

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        buffers = {
            name: Placement.split(buffer.shape, group.size, dim, blocks)
            for name, dim, blocks in self.cuts
            if (buffer := module._buffers.get(name)) is not None
        }
        module.forward = CutForward(
            module, group, self.enters, self.leaves, self.added_once, buffers, self._numbers(module, group)
        )

    def _numbers(self, module: nn.Module, group: RankGroup) -> dict[str, Any]:
        """Those numbers of a convolution or a norm that its forward checks or uses, for this rank."""
        weight = module._parameters.get("weight")
        dims = {name: dim for name, dim, _ in self.cuts}
        if weight is None or "weight" not in dims:
            return {}
        if isinstance(module, nn.LayerNorm):
            return {"normalized_shape": (weight.shape[-1],)}
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
            return {"groups": module.groups // group.size}
        return {}

    def revert(self, module: nn.Module) -> None:
        del module.forward


@dataclass(frozen=True)
class WholeNormOfAnyKind:
    """A norm over all heads, or all columns, that is no root mean square: see `GatheredNorm`."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {name: Placement.replicate(own.shape, num_ranks) for name, own in module.named_parameters(recurse=False)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = GatheredNorm(module, group)

    def revert(self, module: nn.Module) -> None:
        del module.forward


class EnteredInputs:
    """A forward pre-hook: every tensor argument enters the sharded region."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(self._enter, args)), {name: self._enter(value) for name, value in kwargs.items()}

    def _enter(self, value: Any) -> Any:
        return self.group.enter(value) if isinstance(value, Tensor) and value.requires_grad else value


@dataclass(frozen=True)
class SharedInputs:
    """A block whose column-wise layers read several of its tensor arguments, all of which are whole."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.register_forward_pre_hook(EnteredInputs(group), with_kwargs=True)

    def revert(self, module: nn.Module) -> None:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, EnteredInputs):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


@dataclass(frozen=True)
class LocalWidths(Wrapper):
    """An attention whose forward takes the number or width of its heads from its input, which is whole.

    A view or reshape that does not fit is done with the local one of these `numbers` instead.
    """

    numbers: tuple[int, ...] = field(default=())

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = LocalWidthsForward(module, self.numbers, group.size)


class LocalWidthsForward(WrappingForward):
    """Runs a forward in which numbers of all ranks may stand for those of this rank."""

    def __init__(self, module: nn.Module, numbers: tuple[int, ...], num_ranks: int) -> None:
        super().__init__(module)
        self.numbers = numbers
        self.num_ranks = num_ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _RetriesViews(self.numbers, self.num_ranks):
            return self.stock(*args, **kwargs)


class _RetriesViews(TorchFunctionMode):
    def __init__(self, numbers: tuple[int, ...], num_ranks: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.num_ranks = num_ranks

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.Tensor.view, torch.Tensor.reshape, torch.reshape) or len(args) < 2:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            shape = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
            for number in self.numbers:
                for place, size in enumerate(shape):
                    if size != number or number % self.num_ranks:
                        continue
                    local = [*shape[:place], number // self.num_ranks, *shape[place + 1 :]]
                    known = torch.Size(size for size in local if size != -1).numel()
                    count = args[0].numel()
                    if known == count or (-1 in local and known and count % known == 0):
                        return args[0].reshape(local)
            raise
