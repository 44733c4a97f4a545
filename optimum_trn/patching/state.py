"""What a patched model knows of its layout, and the report for its user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils import logging

from optimum_trn.parallel.mesh import DATA_AXIS, TENSOR_AXIS, ParallelConfig
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.expert_parallel import ExpertShards
from optimum_trn.patching.pipelined import PipelinedModel
from optimum_trn.patching.styles import Action

logger = logging.get_logger(__name__)

STATE_ATTRIBUTE = "_optimum_trn_patch"


@dataclass(frozen=True)
class PatchReport:
    """What patching did: the style of every swapped module, and the modules whose parameters every rank holds whole."""

    model_type: str
    tensor_parallel_size: int
    swapped: dict[str, str]
    replicated: tuple[str, ...]
    total_parameters: int
    local_parameters: int
    local_logits: bool
    unproven: Mapping[str, str] = field(default_factory=dict)
    whole_towers: Mapping[str, str] = field(default_factory=dict)
    """Models within the model of which nothing is sharded, by path: their model types."""

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}, tensor parallel {self.tensor_parallel_size}: "
            f"{self.local_parameters:,} of {self.total_parameters:,} parameters on each rank"
        ]
        kinds = {_pattern(path): style for path, style in self.swapped.items()}
        lines += [f"  {path}: {style}" for path, style in kinds.items()]
        towers = [f"{path} ({model_type})" for path, model_type in self.whole_towers.items()]
        if towers:
            lines.append(f"  whole on every rank: {', '.join(towers)}")
        others = [path for path in self.replicated if not any(_within(path, tower) for tower in self.whole_towers)]
        if others:
            lines.append(f"  replicated: {', '.join(dict.fromkeys(map(_pattern, others)))}")
        lines += [f"  NOT SHARDED, since not proven: {path} ({reason})" for path, reason in self.unproven.items()]
        if self.local_logits:
            lines.append("  outputs.logits is None in training with labels: only the loss sees the sharded logits")
        return "\n".join(lines)


def whole_towers(model: nn.Module, swapped: Iterable[str]) -> dict[str, str]:
    """The outermost transformers models within a model in which no module is swapped: their model types, by path."""
    towers: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or not isinstance(module, PreTrainedModel) or any(_within(path, outer) for outer in towers):
            continue
        if any(True for _ in module.parameters()) and not any(_within(other, path) for other in swapped):
            towers[path] = module.config.model_type
    return towers


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@dataclass(frozen=True)
class PatchState:
    """The layout of one patched instance; `placements` says where every parameter lies, by fully qualified name.

    A parameter that is tied appears under each of its names.  Deep copies of the model share the state.
    """

    config: ParallelConfig
    mesh: DeviceMesh | None
    actions: tuple[Action, ...]
    placements: dict[str, Placement]
    report: PatchReport
    pipeline: PipelinedModel | None = None
    experts: ExpertShards | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        return self

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of the model; None in a single process."""
        return None if self.mesh is None else self.mesh.get_group(TENSOR_AXIS)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards and see other data; None in a single process."""
        return None if self.mesh is None else self.mesh.get_group(DATA_AXIS)

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """The ranks over which a parameter lies as its placement says."""
        if self.experts is not None and name in self.experts.placements:
            return self.experts.group.process_group
        return self.tp_group

    def rank_of(self, name: str) -> int:
        """This rank's place in the placement of a parameter."""
        if self.experts is not None and name in self.experts.placements:
            return self.experts.group.rank
        return self.tp_rank

    @property
    def tp_rank(self) -> int:
        """This rank's place among those that share a copy of the model."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(TENSOR_AXIS)

    @property
    def pp_rank(self) -> int:
        """This rank's place in the pipeline."""
        return 0 if self.pipeline is None else self.pipeline.staged.group.rank

    @property
    def holds_first_copy(self) -> bool:
        """Whether this rank has a part of the first whole copy of the model, which is the one that is saved."""
        if self.experts is not None and dist.get_rank(self.experts.replicas) == 0:
            return True
        return self.dp_rank == 0 or (self.mesh is not None and self.mesh.get_local_rank("dp_replicate") == 0)

    @property
    def dp_rank(self) -> int:
        """Which copy of the model this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(DATA_AXIS)


def state_of(model: nn.Module) -> PatchState | None:
    """The state that `patch_model` left on the instance, or None if the model is not patched."""
    state: PatchState | None = getattr(model, STATE_ATTRIBUTE, None)
    return state


def pipeline_of(model: nn.Module) -> PipelinedModel | None:
    """What runs the stages of a model whose layers are cut over a pipeline, or None if they are not."""
    state = state_of(model)
    return None if state is None else state.pipeline


def with_unproven(model: nn.Module, unproven: Mapping[str, str]) -> PatchReport:
    """The report of a patched model, with the parts that an inferred plan leaves whole; it says so to the user, too."""
    state = state_of(model)
    assert state is not None
    if unproven:
        report = replace(state.report, unproven=dict(unproven))
        setattr(model, STATE_ATTRIBUTE, replace(state, report=report))
        logger.warning(
            f"{report.model_type}: every rank holds {', '.join(unproven)} whole, since no way to cut them could be "
            "proven. print(report) says why."
        )
        return report
    return state.report


def set_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have a patched model know its ranks by another mesh, with the same tensor-parallel groups."""
    state = state_of(model)
    assert state is not None
    setattr(model, STATE_ATTRIBUTE, replace(state, mesh=mesh))
