"""The engine: applies styles to one instance of a model, cuts its parameters, and takes both back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss
from optimum_trn.parallel.mesh import TENSOR_AXIS, ParallelConfig, RankGroup
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.outputs import PatchedForward
from optimum_trn.patching.state import STATE_ATTRIBUTE, PatchReport, PatchState, state_of
from optimum_trn.patching.styles import Action


def install(
    model: PreTrainedModel,
    actions: Sequence[Action],
    parallel_config: ParallelConfig,
    mesh: DeviceMesh | None,
) -> PatchState:
    """Applies `actions`, cuts the parameters to this rank's shards and leaves a `PatchState` on the instance.

    Without actions the model stays stock.  Raises `PlanError`, before anything is changed, for a model that is patched
    already and for what `place_parameters` refuses.
    """
    if state_of(model) is not None:
        raise PlanError(f"{type(model).__name__} is patched already. Call unpatch_model first.")
    size = parallel_config.tensor_parallel_size
    total_parameters = sum(parameter.numel() for parameter in model.parameters())
    placements = place_parameters(model, actions, size)
    if actions:
        assert mesh is not None
        group = RankGroup(mesh.get_group(TENSOR_AXIS))
        for name, parameter in model.named_parameters():
            if placements[name].dim is not None:
                _replace_data(parameter, partial(placements[name].shard, rank=group.rank))
        for path, style in actions:
            style.apply(model.get_submodule(path), group)
        _patch_instance(model, group)
    report = PatchReport(
        model_type=model.config.model_type,
        tensor_parallel_size=size,
        swapped={path: type(style).__name__ for path, style in actions},
        replicated=tuple(
            dict.fromkeys(name.rpartition(".")[0] for name, placement in placements.items() if placement.dim is None)
        ),
        total_parameters=total_parameters,
        local_parameters=sum(parameter.numel() for parameter in model.parameters()),
        local_logits=isinstance(model.loss_function, VocabParallelCausalLMLoss),
    )
    state = PatchState(parallel_config, mesh, tuple(actions), placements, report)
    setattr(model, STATE_ATTRIBUTE, state)
    return state


def uninstall(model: PreTrainedModel) -> None:
    """Takes back what `install` did, with the current full weights on every rank; `PlanError` if it did nothing."""
    state = state_of(model)
    if state is None:
        raise PlanError(f"{type(model).__name__} is not patched.")
    if state.actions:
        for name, parameter in model.named_parameters():
            placement = state.placements[name]
            if placement.dim is not None:
                _replace_data(parameter, partial(unshard_from_group, placement=placement, group=state.tp_group))
        for path, style in reversed(state.actions):
            style.revert(model.get_submodule(path))
        _unpatch_instance(model)
    delattr(model, STATE_ATTRIBUTE)


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


def _patch_instance(model: Any, group: RankGroup) -> None:
    head = model.get_output_embeddings()
    if not isinstance(head, ParallelLMHead):
        head = None
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
