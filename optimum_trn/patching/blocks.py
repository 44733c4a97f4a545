"""Roles: what the sub-modules of a transformer layer are for, and which steps of a schedule follow from it."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from optimum_trn.patching.schedule import Selection


class Role(Protocol):
    """A part of a layer that is sharded as a whole: one copy where it enters, one sum where it leaves."""

    def sizes(self, config: Any) -> Mapping[str, int]:
        """The numbers that the tensor-parallel size must divide, by their names in the config."""

    def record(self, layers: Selection) -> None:
        """Records the steps for its modules, by path within the layers."""


def _enter(layers: Selection, *paths: str) -> None:
    """Column-wise linears with one input: its gradient is summed once, by the module that contains them if one does."""
    parent = os.path.commonprefix([path.split(".")[:-1] for path in paths])
    shared = bool(parent) and len(paths) > 1
    if shared:
        layers[".".join(parent)].sync("input gradient", "all_reduce")
    for path in paths:
        column_wise(layers[path])
        if not shared:
            layers[path].sync("input gradient", "all_reduce")


def column_wise(linears: Selection) -> None:
    """Cuts linears by output features."""
    linears.shard("weight", 0)
    if all(getattr(linear, "bias", None) is not None for linear in linears):
        linears.shard("bias", 0)


def _leave(layers: Selection, path: str) -> None:
    """A row-wise linear, which ends the sharded part."""
    layers[path].shard("weight", 1).sync("output", "all_reduce")


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

    def record(self, layers: Selection) -> None:
        _enter(layers, self.q, self.k, self.v)
        for path in self.per_head_norms:
            layers[path].sync("weight gradients", "all_reduce")
        _leave(layers, self.o)


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), cut along the intermediate width."""

    gate: str
    up: str
    down: str
    width: str = "intermediate_size"

    def sizes(self, config: Any) -> Mapping[str, int]:
        return {self.width: getattr(config, self.width)}

    def record(self, layers: Selection) -> None:
        _enter(layers, self.gate, self.up)
        _leave(layers, self.down)


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x))), cut along the intermediate width."""

    up: str
    down: str
    width: str = "intermediate_size"

    def sizes(self, config: Any) -> Mapping[str, int]:
        return {self.width: getattr(config, self.width)}

    def record(self, layers: Selection) -> None:
        _enter(layers, self.up)
        _leave(layers, self.down)
