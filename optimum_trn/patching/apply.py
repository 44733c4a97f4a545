"""Patching: applies the plan of a stock transformers model to one instance of it, and takes it back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from optimum_trn.errors import PlanError
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss
from optimum_trn.parallel.mesh import DATA_AXIS, TENSOR_AXIS, ParallelConfig, RankGroup
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.blocks import Action
from optimum_trn.patching.outputs import PatchedForward
from optimum_trn.patching.plan import ModelPlan
from optimum_trn.patching.registry import get_plan
from optimum_trn.patching.styles import cut_parameters

_STATE = "_optimum_trn_patch"


@dataclass(frozen=True)
class PatchReport:
    """What patching did: the style of every swapped module, and the modules whose parameters every rank holds whole."""

    model_type: str
    tensor_parallel_size: int
    swapped: dict[str, str]
    replicated: tuple[str, ...]
    total_parameters: int
    local_parameters: int

    def __str__(self) -> str:
        lines = [
            f"{self.model_type}, tensor parallel {self.tensor_parallel_size}: "
            f"{self.local_parameters:,} of {self.total_parameters:,} parameters on each rank"
        ]
        kinds = {_pattern(path): style for path, style in self.swapped.items()}
        lines += [f"  {path}: {style}" for path, style in kinds.items()]
        if self.replicated:
            lines.append(f"  replicated: {', '.join(dict.fromkeys(map(_pattern, self.replicated)))}")
        return "\n".join(lines)


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@dataclass
class PatchState:
    """What a patched model knows of its layout: where every parameter lies, by its fully qualified name."""

    config: ParallelConfig
    mesh: DeviceMesh | None
    plan: ModelPlan | None
    report: PatchReport
    placements: dict[str, Placement] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of the model; None in a single process."""
        return None if self.mesh is None else self.mesh.get_group(TENSOR_AXIS)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards and see other data; None in a single process."""
        return None if self.mesh is None else self.mesh.get_group(DATA_AXIS)

    @property
    def tp_rank(self) -> int:
        """This rank's place among those that share a copy of the model."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(TENSOR_AXIS)

    @property
    def dp_rank(self) -> int:
        """Which copy of the model this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(DATA_AXIS)


def state_of(model: nn.Module) -> PatchState | None:
    """The state that `patch_model` left on the instance, or None if the model is not patched."""
    state: PatchState | None = getattr(model, _STATE, None)
    return state


def patch_model(model: PreTrainedModel, parallel_config: ParallelConfig, mesh: DeviceMesh | None = None) -> PatchReport:
    """Makes a stock transformers model tensor-parallel, in place: on this rank only its own shards are left.

    Works on real weights, whose full storage is freed module by module, and on the meta device.  Without `mesh`, one is
    built over all ranks.  Nothing has changed when it raises: `MeshError` (degrees and world size), `PlanError` (sizes
    that do not divide, paths or modules that the plan does not fit, a model patched already) or `UnsupportedModelError`.
    """
    if state_of(model) is not None:
        raise PlanError(f"{type(model).__name__} is patched already. Call unpatch_model first.")
    if mesh is None:
        mesh = parallel_config.build_mesh()
    size = parallel_config.tensor_parallel_size
    total = sum(parameter.numel() for parameter in model.parameters())
    plan: ModelPlan | None = None
    actions: list[Action] = []
    planned: list[dict[str, Placement]] = []
    if size > 1:
        assert mesh is not None
        plan = get_plan(model.config.model_type)
        plan.validate(model.config, size)
        actions = plan.actions(model)
        planned = [_placements(model, action, size) for action in actions]

    cut: set[int] = set()
    if size > 1:
        assert mesh is not None
        group = RankGroup(mesh.get_group(TENSOR_AXIS))
        for (path, style), placements in zip(actions, planned, strict=True):
            module = model.get_submodule(path)
            fresh = {name: p for name, p in placements.items() if id(module.get_parameter(name)) not in cut}
            cut_parameters(module, fresh, group.rank)
            cut.update(id(module.get_parameter(name)) for name in fresh)
            style.apply(module, group)
        _patch_outputs(model, plan, group)

    by_name = {
        f"{action.path}.{name}": placement
        for action, placements in zip(actions, planned, strict=True)
        for name, placement in placements.items()
    }
    names = dict(model.named_parameters(remove_duplicate=False))
    state = PatchState(
        config=parallel_config,
        mesh=mesh,
        plan=plan,
        placements={name: by_name.get(name, Placement.replicate(p.shape, size)) for name, p in names.items()},
        actions=actions,
        report=PatchReport(
            model_type=model.config.model_type,
            tensor_parallel_size=size,
            swapped={path: type(style).__name__ for path, style in actions},
            replicated=tuple(dict.fromkeys(name.rpartition(".")[0] for name in names if name not in by_name)),
            total_parameters=total,
            local_parameters=sum(parameter.numel() for parameter in model.parameters()),
        ),
    )
    setattr(model, _STATE, state)
    return state.report


def _placements(model: nn.Module, action: Action, size: int) -> dict[str, Placement]:
    try:
        return action.style.placements(model.get_submodule(action.path), size)
    except PlanError as error:
        raise PlanError(f"{action.path}: {error}") from None


def _patch_outputs(model: Any, plan: ModelPlan | None, group: RankGroup) -> None:
    assert plan is not None
    head = model.get_submodule(plan.lm_head) if plan.has_lm_head(model) else None
    assert head is None or isinstance(head, ParallelLMHead)
    model.forward = PatchedForward(model, head, group)
    if head is not None and model.loss_function is ForCausalLMLoss:
        model.loss_function = VocabParallelCausalLMLoss(ForCausalLMLoss, group)


@torch.no_grad()
def unpatch_model(model: PreTrainedModel) -> None:
    """Makes a patched model stock again, with the current full weights on every rank.

    A collective over the tensor-parallel ranks: all of them must call it.  `PlanError` if the model is not patched.
    """
    state = state_of(model)
    if state is None:
        raise PlanError(f"{type(model).__name__} is not patched.")
    if state.actions:
        whole: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            placement = state.placements[name]
            if placement.dim is None or id(parameter) in whole:
                continue
            whole.add(id(parameter))
            grad, parameter.grad = parameter.grad, None
            parameter.data = gather_full(parameter.data, placement, state.tp_group)
            parameter.grad = None if grad is None else gather_full(grad, placement, state.tp_group)
        for path, style in reversed(state.actions):
            style.revert(model.get_submodule(path))
        forward = model.__dict__.pop("forward")
        if forward.wrapped is not None:
            model.forward = forward.wrapped
        if isinstance(model.loss_function, VocabParallelCausalLMLoss):
            del model._loss_function
    delattr(model, _STATE)


def gather_full(local: torch.Tensor, placement: Placement, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The global tensor, on every rank of `group`, from this rank's local one."""
    if placement.dim is None:
        return local
    shards = [torch.empty_like(local) for _ in range(placement.num_ranks)]
    dist.all_gather(shards, local.contiguous(), group=group)
    return placement.unshard(shards)
