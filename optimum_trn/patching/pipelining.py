"""Cuts a model into the pipeline stages that the marks of a schedule ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import PIPELINE_AXIS, ParallelConfig, RankGroup, pipeline_size
from optimum_trn.parallel.pipeline import Pipeline
from optimum_trn.patching.marks import BesideLayers, EndsStage, Mark
from optimum_trn.patching.pipelined import PipelinedModel
from optimum_trn.patching.sequence import SequenceSharded
from optimum_trn.patching.stage_map import map_stages
from optimum_trn.patching.stages import StagedModel
from optimum_trn.patching.styles import Action


def cut_stages(
    model: PreTrainedModel, actions: Sequence[Action], parallel_config: ParallelConfig, mesh: DeviceMesh | None
) -> PipelinedModel | None:
    """Leaves of a whole model the stages of this rank; None where the mesh has no pipeline.

    Raises `PlanError`, before anything is changed, if the marks make another number of stages than the schedule of the
    pipeline runs, and for models whose loss takes something from every layer.
    """
    ends = [path for path, style in actions if isinstance(style, EndsStage)]
    if pipeline_size(mesh) == 1:
        return None
    assert mesh is not None
    config: Any = model.config
    wanted = parallel_config.num_stages
    if len(ends) + 1 != wanted:
        raise PlanError(
            f"The schedule cuts {len(ends) + 1} pipeline stages, but pipeline_schedule "
            f"{parallel_config.pipeline_schedule!r} runs {wanted} on {parallel_config.pipeline_parallel_size} ranks. "
            f"Cut after {wanted - 1} layers."
        )
    for flag in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, flag, False):
            raise PlanError(
                f"config.{flag}=True asks for a result of every layer, but pipeline stages hand on only that of their "
                f"last one. Set it to False, or pipeline_parallel_size=1."
            )
    beside = {path: style.side for path, style in actions if isinstance(style, BesideLayers)}
    stages = map_stages(model, stacks_of(model, ends), ends, beside)
    if stages.encoder_end is not None and parallel_config.pipeline_schedule == "zero_bubble":
        # torch's split of a backward pass loses gradients where inputs join a stage in several places.
        raise PlanError(
            f"pipeline_schedule='zero_bubble' does not run encoder-decoders such as {type(model).__name__}. Use one of "
            "1f1b, interleaved_1f1b and gpipe."
        )
    group = RankGroup(mesh.get_group(PIPELINE_AXIS))
    engine = Pipeline(group, parallel_config.pipeline_schedule, _device(mesh))
    return PipelinedModel(model, StagedModel(model, stages, group), engine)


def stacks_of(model: PreTrainedModel, ends: Sequence[str]) -> list[str]:
    """The module lists of the layers at which stages end; of an encoder-decoder always both."""
    stacks = list(dict.fromkeys(path.rpartition(".")[0] for path in ends))
    if len(stacks) == 1:
        twins = [stacks[0].replace("encoder", "decoder"), stacks[0].replace("decoder", "encoder")]
        modules = dict(model.named_modules())
        stacks = [stack for stack in modules if stack in twins]
    return stacks


def concerns(pipeline: PipelinedModel, action: Action) -> bool:
    """Whether an action is for a module of this rank, or one that it must do for the modules of others, too."""
    path, style = action
    # The first layer tells all others how long the sequence is.
    return (
        pipeline.staged.holds(path) or isinstance(style, Mark) or (isinstance(style, SequenceSharded) and style.first)
    )


def _device(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
