"""What a role is, how roles are chosen by what a layer has, and the steps that all of them record."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block
from optimum_trn.patching.schedule import Selection


class Role(Protocol):
    """A part of a layer that is sharded as a whole: one copy where it enters, one sum where it leaves."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules that a layer must have to have this part, by path within the layer."""

    def sizes(self, config: Any) -> Mapping[str, int]:
        """The numbers of parts that go to the ranks, by their names in the config."""

    def record(self, layers: Selection, config: Any) -> None:
        """Records the steps for its modules, by path within the layers."""


@dataclass(frozen=True)
class OneOf:
    """A part that has another form in some layers or under some configs: the first role whose modules are all there."""

    roles: tuple[Role, ...]

    def __init__(self, *roles: Role) -> None:
        object.__setattr__(self, "roles", roles)

    @property
    def paths(self) -> tuple[str, ...]:
        return ()

    def sizes(self, config: Any) -> Mapping[str, int]:
        return {name: size for role in self.roles for name, size in role.sizes(config).items()}

    def record(self, layers: Selection, config: Any) -> None:
        rest = list(layers.each())
        for role in self.roles:
            fitting = [layer for layer in rest if all(layer.has(path) for path in role.paths)]
            rest = [layer for layer in rest if layer not in fitting]
            if len(fitting) == len(list(layers.each())):
                role.record(layers, config)
            else:
                for layer in fitting:
                    role.record(layer, config)
        if rest:
            raise PlanError(
                f"{rest[0].path} has the modules of none of the roles {[role.paths for role in self.roles]}."
            )


@dataclass(frozen=True)
class Where:
    """A part that only some layers have, such as a cross-attention."""

    role: Role

    @property
    def paths(self) -> tuple[str, ...]:
        return ()

    def sizes(self, config: Any) -> Mapping[str, int]:
        return self.role.sizes(config)

    def record(self, layers: Selection, config: Any) -> None:
        for selection in present(layers, *self.role.paths):
            self.role.record(selection, config)


def present(layers: Selection, *paths: str) -> list[Selection]:
    """The layers that have all `paths`, in one selection if all of them do."""
    every = list(layers.each())
    having = [layer for layer in every if all(layer.has(path) for path in paths)]
    return [layers] if len(having) == len(every) else having


def size_of(config: Any, *names: str) -> dict[str, int]:
    """Those of the named numbers that the config has; None stands for a default that only the model knows."""
    found = {name: getattr(config, name, None) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def parent(paths: Sequence[str]) -> str:
    """The path of the module that contains all of `paths`; empty if it is the layer itself."""
    return ".".join(os.path.commonprefix([path.split(".")[:-1] for path in paths]))


def enter(layers: Selection, linears: Mapping[str, Sequence[Block]], shared: bool = True) -> None:
    """Column-wise linears with one input, and the blocks of their output features, if these are not one.

    The gradient of the input is summed once, by the module that contains them if one does and it is `shared`.
    """
    region = parent(list(linears))
    shared = shared and bool(region) and len(linears) > 1
    if shared:
        layers[region].sync("input gradient", "all_reduce")
    for path, blocks in linears.items():
        column_wise(layers[path], blocks)
        if not shared:
            layers[path].sync("input gradient", "all_reduce")


def column_wise(linears: Selection, blocks: Sequence[Block] = ()) -> None:
    """Cuts linears by output features, which consist of consecutive `blocks` that are each cut, or of one."""
    dims = {0 if isinstance(linear, nn.Linear) else 1 for linear in linears}
    linears.shard("weight", dims.pop(), blocks)
    if all(getattr(linear, "bias", None) is not None for linear in linears):
        linears.shard("bias", 0, blocks)


def leave(layers: Selection, path: str, blocks: Sequence[Block] = ()) -> None:
    """A row-wise linear, which ends the sharded part; its input features consist of `blocks`, if they are not one."""
    dims = {0 if isinstance(linear, Conv1D) else 1 for linear in layers[path]}
    layers[path].shard("weight", dims.pop(), blocks).sync("output", "all_reduce")


def require_known(layers: Selection, region: str, known: Sequence[str]) -> None:
    """Raises `PlanError` for a module with parameters in `region` of a layer that the role does not know.

    It would see sharded activations, and nothing would sum its gradients.
    """
    if not region:
        return
    for block in layers[region]:
        for name, _ in block.named_parameters():
            owner = ".".join([region, *name.split(".")[:-1]])
            full = f"{region}.{name}"
            if not any(path in (owner, full) or owner.startswith(f"{path}.") for path in known):
                raise PlanError(
                    f"{layers[region].path}: its parameter {name!r} is in the part that is cut over the ranks, and the "
                    "plan does not say what it is for. Name it in the role, or leave the model type unsharded."
                )
