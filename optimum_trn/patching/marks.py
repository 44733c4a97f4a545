"""Marks: styles that change nothing and say something, which whoever finds them on a patched model may act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.elsewhere import Side
from optimum_trn.patching.state import state_of


class Mark:
    """A style that changes nothing."""

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        return {}

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        """Nothing to change."""

    def revert(self, module: nn.Module) -> None:
        """Nothing was changed."""


@dataclass(frozen=True)
class Annotated(Mark):
    """A parameter of the module has a tag: a key with a value."""

    parameter: str
    key: str
    value: Any


@dataclass(frozen=True)
class EndsStage(Mark):
    """The last layer of a pipeline stage."""


@dataclass(frozen=True)
class BesideLayers(Mark):
    """A module that is used before or after all layers, whatever the order of registration says."""

    side: Side


@dataclass(frozen=True)
class Tower(Mark):
    """A model within the model, which is sharded by a plan of its own and makes its own outputs whole."""


def annotations_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The tags of the parameters of a patched model, by fully qualified name; the model's copies have them, too."""
    state = state_of(model)
    tags: dict[str, dict[str, Any]] = {}
    for path, style in () if state is None else state.actions:
        if isinstance(style, Annotated):
            tags.setdefault(f"{path}.{style.parameter}", {})[style.key] = style.value
    return tags


def stages_of(model: nn.Module) -> list[list[str]]:
    """The layers of each pipeline stage of a patched model, by path; a single stage of none where nothing is cut."""
    state = state_of(model)
    if state is not None and state.pipeline is not None:
        chain = state.pipeline.staged.stages
        return [
            [path for stack in chain.stacks for path in stack if chain.modules[path] == stage]
            for stage in range(chain.num_stages)
        ]
    ends = [path for path, style in (() if state is None else state.actions) if isinstance(style, EndsStage)]
    if not ends:
        return [[]]
    layers = ends[0].rpartition(".")[0]
    stages: list[list[str]] = [[]]
    for name, _ in model.get_submodule(layers).named_children():
        stages[-1].append(f"{layers}.{name}")
        if stages[-1][-1] in ends:
            stages.append([])
    return stages
