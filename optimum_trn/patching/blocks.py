"""Roles: what the sub-modules of a transformer layer are for, and which styles follow from it."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from optimum_trn.patching.styles import ColumnWise, RowWise, SharedInput, Style, SummedGradients


class Action(NamedTuple):
    """One style for one module, by its path."""

    path: str
    style: Style


class Role(Protocol):
    """A part of a layer that is sharded as a whole: one copy where it enters, one sum where it leaves."""

    def sizes(self, config: Any) -> Mapping[str, int]:
        """The numbers that the tensor-parallel size must divide, by their names in the config."""

    def actions(self) -> tuple[Action, ...]:
        """The styles of its modules, by path within the layer."""


def _enter(paths: tuple[str, ...]) -> tuple[Action, ...]:
    """Column-wise layers with one input: the copy is made once, by the module that contains them if there is one."""
    parent = os.path.commonprefix([path.split(".")[:-1] for path in paths])
    if not parent or len(paths) == 1:
        return tuple(Action(path, ColumnWise(copies_input=True)) for path in paths)
    return (Action(".".join(parent), SharedInput()), *(Action(path, ColumnWise()) for path in paths))


@dataclass(frozen=True)
class Attention:
    """Multi-head or grouped-query attention with separate projections, cut by heads.

    `per_head_norms` act within a head; `num_heads` and `num_kv_heads` are the names of the config's attributes.
    """

    q: str
    k: str
    v: str
    o: str
    per_head_norms: tuple[str, ...] = ()
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"

    def sizes(self, config: Any) -> Mapping[str, int]:
        heads = getattr(config, self.num_heads)
        kv_heads = getattr(config, self.num_kv_heads, None)
        return {self.num_heads: heads} | ({} if kv_heads is None else {self.num_kv_heads: kv_heads})

    def actions(self) -> tuple[Action, ...]:
        norms = tuple(Action(path, SummedGradients()) for path in self.per_head_norms)
        return (*_enter((self.q, self.k, self.v)), *norms, Action(self.o, RowWise()))


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), cut along the intermediate width."""

    gate: str
    up: str
    down: str
    width: str = "intermediate_size"

    def sizes(self, config: Any) -> Mapping[str, int]:
        return {self.width: getattr(config, self.width)}

    def actions(self) -> tuple[Action, ...]:
        return (*_enter((self.gate, self.up)), Action(self.down, RowWise()))


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x))), cut along the intermediate width."""

    up: str
    down: str
    width: str = "intermediate_size"

    def sizes(self, config: Any) -> Mapping[str, int]:
        return {self.width: getattr(config, self.width)}

    def actions(self) -> tuple[Action, ...]:
        return (*_enter((self.up,)), Action(self.down, RowWise()))
