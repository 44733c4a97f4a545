"""Patching: applies the plan of a stock transformers model to one instance of it, and takes it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss
from optimum_trn.parallel.mesh import TENSOR_AXIS, ParallelConfig, RankGroup
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.blocks import Action
from optimum_trn.patching.outputs import PatchedForward
from optimum_trn.patching.plan import ModelPlan
from optimum_trn.patching.registry import get_plan
from optimum_trn.patching.state import STATE_ATTRIBUTE, PatchReport, PatchState, state_of


def patch_model(model: PreTrainedModel, parallel_config: ParallelConfig, mesh: DeviceMesh | None = None) -> PatchReport:
    """Makes a stock transformers model tensor-parallel, in place: on this rank only its own shards are left.

    Works on real weights, whose full storage is freed module by module, and on the meta device.  Without `mesh`, one is
    built over all ranks.  The model is as it was when this raises: `MeshError` (degrees and world size), `PlanError`
    (sizes that do not divide, modules that the plan does not fit, a patched model) or `UnsupportedModelError`.
    """
    if state_of(model) is not None:
        raise PlanError(f"{type(model).__name__} is patched already. Call unpatch_model first.")
    size = parallel_config.tensor_parallel_size
    if mesh is None:
        mesh = parallel_config.build_mesh()
    elif mesh[TENSOR_AXIS].size() != size:
        raise MeshError(f"tensor_parallel_size is {size}, but the mesh has {mesh[TENSOR_AXIS].size()} such ranks.")

    total_parameters = sum(parameter.numel() for parameter in model.parameters())
    plan: ModelPlan | None = None
    actions: tuple[Action, ...] = ()
    if size > 1:
        plan = get_plan(model.config.model_type)
        plan.validate(model.config, size)
        actions = tuple(plan.actions(model))
    placements = place_parameters(model, actions, size)
    if plan is not None:
        assert mesh is not None
        group = RankGroup(mesh.get_group(TENSOR_AXIS))
        for name, parameter in model.named_parameters():
            if placements[name].dim is not None:
                _replace_data(parameter, partial(placements[name].shard, rank=group.rank))
        for path, style in actions:
            style.apply(model.get_submodule(path), group)
        _patch_instance(model, plan, group)

    report = PatchReport(
        model_type=model.config.model_type,
        tensor_parallel_size=size,
        swapped={path: type(style).__name__ for path, style in actions},
        replicated=tuple(
            dict.fromkeys(name.rpartition(".")[0] for name, placement in placements.items() if placement.dim is None)
        ),
        total_parameters=total_parameters,
        local_parameters=sum(parameter.numel() for parameter in model.parameters()),
        local_logits=isinstance(getattr(model, "loss_function", None), VocabParallelCausalLMLoss),
    )
    setattr(model, STATE_ATTRIBUTE, PatchState(parallel_config, mesh, plan, actions, placements, report))
    return report


def place_parameters(model: nn.Module, actions: Sequence[Action], num_ranks: int) -> dict[str, Placement]:
    """Where every parameter of a stock model is to lie, under each of its names; what no action cuts is replicated.

    Raises `PlanError` for a module that does not suit its style, and for a cut parameter that is tied to a module which
    no action covers, or which would cut it in another way.
    """
    planned: dict[str, Placement] = {}
    by_parameter: dict[int, tuple[str, Placement]] = {}
    for path, style in actions:
        module = model.get_submodule(path)
        try:
            own = style.placements(module, num_ranks)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        for name, placement in own.items():
            planned[f"{path}.{name}"] = placement
            by_parameter[id(module.get_parameter(name))] = f"{path}.{name}", placement
    result = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = Placement.replicate(parameter.shape, num_ranks)
        result[name] = planned.get(name, whole)
        tied_name, placement = by_parameter.get(id(parameter), (name, whole))
        if result[name] != placement:
            raise PlanError(
                f"{name} and {tied_name} are one tied parameter, but the plan shards only one of them, or each along "
                "another dimension. Give both modules a style that cuts it alike."
            )
    return result


def _replace_data(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    """Gives the same Parameter, and so everything tied to it, other data; a gradient goes along."""
    with torch.no_grad():
        grad, parameter.grad = parameter.grad, None
        parameter.data = function(parameter.data)
        parameter.grad = None if grad is None else function(grad)


class RefusedWhilePatched:
    """Stands on the instance for a stock method that would take this rank's shards for the whole model."""

    def __init__(self, method: str, advice: str) -> None:
        self.method = method
        self.advice = advice

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError(f"{self.method} would see only the shards of this rank. {self.advice}")


REFUSED = (
    RefusedWhilePatched(
        "save_pretrained",
        "Save through NeuronTrainer, or load the model with NeuronModelForCausalLM, or call unpatch_model first.",
    ),
    RefusedWhilePatched("resize_token_embeddings", "Resize before patch_model, or call unpatch_model first."),
)


def _patch_instance(model: Any, plan: ModelPlan, group: RankGroup) -> None:
    head = model.get_submodule(plan.lm_head) if plan.has_lm_head(model) else None
    assert head is None or isinstance(head, ParallelLMHead)
    model.forward = PatchedForward(model, head, group)
    if head is not None and model.loss_function is ForCausalLMLoss:
        model.loss_function = VocabParallelCausalLMLoss(ForCausalLMLoss, group)
    for refusal in REFUSED:
        setattr(model, refusal.method, refusal)


def _unpatch_instance(model: Any) -> None:
    forward = model.__dict__.pop("forward")
    if forward.wrapped is not None:
        model.forward = forward.wrapped
    if isinstance(model.loss_function, VocabParallelCausalLMLoss):
        del model._loss_function
    for refusal in REFUSED:
        if isinstance(model.__dict__.get(refusal.method), RefusedWhilePatched):
            delattr(model, refusal.method)


def unpatch_model(model: PreTrainedModel) -> None:
    """Makes a patched model stock again, with the current full weights on every rank.

    A collective over the tensor-parallel ranks: all of them must call it.  `PlanError` if the model is not patched.
    """
    state = state_of(model)
    if state is None:
        raise PlanError(f"{type(model).__name__} is not patched.")
    if state.plan is not None:
        for name, parameter in model.named_parameters():
            placement = state.placements[name]
            if placement.dim is not None:
                _replace_data(parameter, partial(unshard_from_group, placement=placement, group=state.tp_group))
        for path, style in reversed(state.actions):
            style.revert(model.get_submodule(path))
        _unpatch_instance(model)
    delattr(model, STATE_ATTRIBUTE)
