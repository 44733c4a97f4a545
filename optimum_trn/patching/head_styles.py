"""Styles of what attention has for each head beside its projections: tables, norms, numbers of heads, inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block, HeadLayout, Heads
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.norm import ShardedRMSNorm
from optimum_trn.parallel.sharding import Placement


@dataclass(frozen=True)
class PerHead:
    """A parameter with entries for each head along `dim`, such as sinks or a table of biases, cut with the heads."""

    parameter: str
    dim: int
    blocks: tuple[Block, ...] = ()

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        shape = module.get_parameter(self.parameter).shape
        return {self.parameter: Placement.split(shape, num_ranks, self.dim, self.blocks)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        """The stock forward computes with fewer heads as it is."""

    def revert(self, module: nn.Module) -> None:
        """Nothing was changed."""


@dataclass(frozen=True)
class PerRankAttributes:
    """Numbers of heads or widths that a forward reads from its module: each rank has its share of them.

    A single head, as of multi-query keys, is on every rank.  `layout` says how many heads there are on a rank where
    they are not simply an equal part.
    """

    names: tuple[str, ...]
    layout: HeadLayout | None = None

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        for name in self.names:
            _share(module, name, num_ranks, self.layout)
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        whole = {name: getattr(module, name) for name in self.names}
        for name in self.names:
            setattr(module, name, _share(module, name, group.size, self.layout))
        module.whole_attributes = whole  # type: ignore[assignment]

    def revert(self, module: nn.Module) -> None:
        for name, value in module.__dict__.pop("whole_attributes").items():
            setattr(module, name, value)


@dataclass(frozen=True)
class PerRankConfig:
    """Numbers of heads that a forward reads from its module's config, of which this module sees its share."""

    names: tuple[str, ...]
    layout: HeadLayout | None = None

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        for name in self.names:
            _share(module.config, name, num_ranks, self.layout)
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.whole_config = module.config
        module.config = PerRankView(
            module.config, {name: _share(module.config, name, group.size, self.layout) for name in self.names}
        )  # type: ignore[assignment]

    def revert(self, module: nn.Module) -> None:
        module.config = module.__dict__.pop("whole_config")


class PerRankView:
    """A config whose numbers of heads are those of this rank; all else is read from the config of the model.

    Not a copy: what is set on the model's config later, such as another attention implementation, must be seen here.
    """

    def __init__(self, config: Any, shares: dict[str, int]) -> None:
        self._config = config
        self._shares = shares

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        shares = self.__dict__.get("_shares", {})
        return shares[name] if name in shares else getattr(self.__dict__["_config"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRankView:
        return PerRankView(copy.deepcopy(self._config, memo), dict(self._shares))


def _share(owner: Any, name: str, num_ranks: int, layout: HeadLayout | None) -> int:
    whole: int = getattr(owner, name)
    if layout is not None and name.endswith("groups"):
        return layout.queries_per_key
    if layout is not None:
        of_keys = "key" in name or "kv" in name
        unit, remainder = divmod(whole, layout.num_kv_heads if of_keys else layout.num_heads)
        if remainder:
            raise PlanError(f"{name} {whole} is not a number of entries for each of {layout.num_heads} heads.")
        return unit * (layout.keys_per_rank if of_keys else len(layout.queries(0)))
    share, remainder = divmod(whole, num_ranks)
    if whole == 1:
        return 1
    if remainder:
        raise PlanError(f"{num_ranks} ranks do not divide {name} {whole}.")
    return share


@dataclass(frozen=True)
class WholeNorm:
    """An RMS norm over all heads together: its weight is cut with them, its sum of squares is summed over the ranks."""

    blocks: tuple[Block, ...] = ()

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        names = [name for name, _ in module.named_parameters()]
        if names != ["weight"] or not ShardedRMSNorm.epsilon_of(module):
            raise PlanError(f"WholeNorm is for an RMS norm with a weight, not for {type(module).__name__}.")
        for block in self.blocks:
            if isinstance(block, Heads) and HeadLayout(block.num_heads, block.num_kv_heads, num_ranks).copies > 1:
                raise PlanError(
                    f"{num_ranks} ranks share {block.num_kv_heads} key-value heads, over all of which this norm takes "
                    f"its root mean square. Choose a tensor_parallel_size of at most {block.num_kv_heads}."
                )
        return {"weight": Placement.split(module.get_parameter("weight").shape, num_ranks, 0, self.blocks)}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        whole = sum(block if isinstance(block, int) else block.length for block in self.blocks)
        module.forward = ShardedRMSNorm(module, group, whole or module.get_parameter("weight").shape[0] * group.size)

    def revert(self, module: nn.Module) -> None:
        del module.forward


class LocalHeads:
    """A forward pre-hook: an argument with values for all heads is narrowed to those of this rank."""

    def __init__(self, name: str, position: int, dim: int, heads: HeadLayout, group: RankGroup) -> None:
        self.name = name
        self.position = position
        self.dim = dim
        self.num_heads = heads.num_heads
        self.own = [0 if head is None else head for head in heads.queries(group.rank)]  # padding may have any values

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: self.narrow(kwargs[self.name])}
        if self.position < len(args):
            position = self.position
            return (*args[:position], self.narrow(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    def narrow(self, values: Tensor | None) -> Tensor | None:
        """The values of this rank's heads; heads may lie inside a flattened (batch * heads) dimension.

        A dimension of 1 holds values for all heads, as a mask does unless it carries a bias.
        """
        if values is None or values.shape[self.dim] == 1:
            return values
        heads = values.unflatten(self.dim, (-1, self.num_heads))
        start, count = self.own[0], len(self.own)
        if self.own == list(range(start, start + count)):
            return heads.narrow(self.dim + 1, start, count).flatten(self.dim, self.dim + 1)
        index = torch.tensor(self.own, device=values.device)
        return heads.index_select(self.dim + 1, index).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class PerHeadInput:
    """An argument of an attention's forward that holds values for each of `num_heads` heads along `dim`."""

    argument: str
    dim: int
    num_heads: int
    layout: HeadLayout | None = None

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        position_of(module, self.argument)
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        heads = self.layout or HeadLayout(self.num_heads, self.num_heads, group.size)
        hook = LocalHeads(self.argument, position_of(module, self.argument), self.dim, heads, group)
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def revert(self, module: nn.Module) -> None:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, LocalHeads):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def position_of(module: nn.Module, argument: str) -> int:
    """Where an argument of a module's forward stands; `PlanError` if it has none of this name."""
    names: Sequence[str] = list(inspect.signature(type(module).forward).parameters)[1:]
    if argument not in names:
        raise PlanError(f"the forward of {type(module).__name__} has no argument {argument!r}, only {names}.")
    return names.index(argument)
