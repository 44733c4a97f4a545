"""The engine: applies styles to one instance of a model, cuts its parameters, and takes both back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import HeadLayout, Heads
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss, VocabParallelMaskedLMLoss
from optimum_trn.parallel.mesh import CONTEXT_AXIS, TENSOR_AXIS, ParallelConfig, RankGroup
from optimum_trn.patching.adapters import has_adapters, unwatch_for_adapters, watch_for_adapters
from optimum_trn.patching.context import check_context, share_context, unshare_context
from optimum_trn.patching.cutting import cut, place_parameters, restore
from optimum_trn.patching.expert_parallel import check_experts, place_experts, share_experts, unshare_experts
from optimum_trn.patching.expert_styles import CutExperts
from optimum_trn.patching.generation import Generate
from optimum_trn.patching.marks import Tower
from optimum_trn.patching.outputs import PatchedForward, WholeAttentions, calls_loss_function
from optimum_trn.patching.pipelining import concerns, cut_stages
from optimum_trn.patching.recompute import check_recompute, keep_activations, recompute
from optimum_trn.patching.resize import ResizeTokenEmbeddings
from optimum_trn.patching.sequence import sequence_of
from optimum_trn.patching.state import STATE_ATTRIBUTE, PatchReport, PatchState, state_of, whole_towers
from optimum_trn.patching.styles import Action
from optimum_trn.patching.wrappers import Wrapper


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
    shares_context = parallel_config.context_parallel_size > 1
    if shares_context:
        check_context(model)
    check_recompute(model, parallel_config)
    size, expert_size = parallel_config.tensor_parallel_size, parallel_config.expert_parallel_size
    if expert_size > 1:
        check_experts(model, expert_size)
        actions = [action for action in actions if not isinstance(action.style, CutExperts)]
    total_parameters = sum(parameter.numel() for parameter in model.parameters())
    placements = place_parameters(model, actions, size)
    experts = None
    if expert_size > 1:
        assert mesh is not None
        experts = place_experts(model, mesh, expert_size)
        placements |= experts.placements
    pipeline = cut_stages(model, actions, parallel_config, mesh)
    if experts is not None:
        assert mesh is not None
        share_experts(model, experts, RankGroup(mesh.get_group(TENSOR_AXIS)))
    if pipeline is not None:
        actions = [action for action in actions if concerns(pipeline, action)]
    if actions and all(isinstance(style, Wrapper) for _, style in actions) and size == 1:
        for path, style in actions:
            style.apply(model.get_submodule(path), None)  # type: ignore[arg-type]
    elif actions:
        assert mesh is not None
        group = RankGroup(mesh.get_group(TENSOR_AXIS))
        cut(model, actions, placements, group)
        patch_instance(model, group, actions)
    if hasattr(model, "generate") and (pipeline is not None or size > 1):
        model.generate = Generate(model)  # type: ignore[assignment]
    report = PatchReport(
        model_type=model.config.model_type,
        tensor_parallel_size=size,
        swapped={
            path: ", ".join(type(style).__name__ for other, style in actions if other == path)
            for path in dict.fromkeys(path for path, _ in actions)
        },
        replicated=tuple(
            dict.fromkeys(name.rpartition(".")[0] for name, placement in placements.items() if placement.dim is None)
        ),
        total_parameters=total_parameters,
        local_parameters=sum(parameter.numel() for parameter in model.parameters()),
        local_logits=isinstance(model.loss_function, VocabParallelCausalLMLoss),
        whole_towers=whole_towers(model, [path for path, _ in actions]) if actions else {},
    )
    state = PatchState(parallel_config, mesh, tuple(actions), placements, report, pipeline, experts)
    setattr(model, STATE_ATTRIBUTE, state)
    if shares_context:
        assert mesh is not None
        share_context(model, RankGroup(mesh.get_group(CONTEXT_AXIS)), pipeline.staged if pipeline else None)
    recompute(model, parallel_config.recompute)
    return state


def uninstall(model: PreTrainedModel) -> None:
    """Takes back what `install` did, with the current full weights on every rank; `PlanError` if it did nothing."""
    state = state_of(model)
    if state is None:
        raise PlanError(f"{type(model).__name__} is not patched.")
    if has_adapters(model):
        raise PlanError("The model has adapters of PEFT. Take them off first: merge_and_unload() or unload().")
    keep_activations(model, state.config.recompute)
    if state.config.context_parallel_size > 1:
        unshare_context(model)
    if state.actions:
        restore(model, state.actions, state.placements, state.tp_group)
    if isinstance(model.__dict__.get("forward"), PatchedForward):
        _unpatch_instance(model)
    model.__dict__.pop("generate", None)
    if state.experts is not None:
        unshare_experts(model, state.experts)
    if state.pipeline is not None:
        state.pipeline.staged.restore()
    delattr(model, STATE_ATTRIBUTE)


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
)


def patch_instance(model: Any, group: RankGroup, actions: Sequence[Action]) -> None:
    """Gives the model as a whole what it needs beside its modules: whole outputs, a loss of local logits, refusals."""
    head = model.get_output_embeddings()
    if not isinstance(head, ParallelLMHead):
        head = None
    towers = [path for path, style in actions if isinstance(style, Tower)]
    for path in towers:
        inner = [action for action in actions if action.path.startswith(f"{path}.")]
        tower: Any = model.get_submodule(path)
        # A composite may call the two stacks of an encoder-decoder itself, past the model that holds them.
        is_pair = getattr(getattr(tower, "config", None), "is_encoder_decoder", False)
        for stack in (tower.get_encoder(), tower.get_decoder()) if is_pair else (tower,):
            stack.register_forward_hook(WholeAttentions(group, _head_orders(inner, group.size)))
    attentions = None if towers else WholeAttentions(group, _head_orders(actions, group.size))
    model.forward = PatchedForward(model, attentions, sequence_of(actions, group))
    stock_loss = model.loss_function
    if head is not None and stock_loss in VOCAB_PARALLEL_LOSSES and calls_loss_function(model):
        model.loss_function = VOCAB_PARALLEL_LOSSES[stock_loss](stock_loss, group)
    model.resize_token_embeddings = ResizeTokenEmbeddings(model)
    for refusal in REFUSED:
        setattr(model, refusal.method, refusal)
    watch_for_adapters(model)


def _head_orders(actions: Sequence[Action], num_ranks: int) -> dict[int, list[int]]:
    """Where the heads of the stock model are among those of all ranks, by the number of heads that a rank computes."""
    orders = {}
    for _, style in actions:
        for block in getattr(style, "blocks", ()):
            if isinstance(block, Heads):
                layout = HeadLayout(block.num_heads, block.num_kv_heads, num_ranks)
                orders[len(layout.queries(0))] = layout.positions()
    return orders


VOCAB_PARALLEL_LOSSES: dict[Any, type[VocabParallelCausalLMLoss]] = {
    ForCausalLMLoss: VocabParallelCausalLMLoss,
    ForMaskedLMLoss: VocabParallelMaskedLMLoss,
}
"""By the stock loss function: the one that takes logits cut along the vocabulary."""


def _unpatch_instance(model: Any) -> None:
    unwatch_for_adapters(model)
    forward = model.__dict__.pop("forward")
    if forward.wrapped is not None:
        model.forward = forward.wrapped
    if isinstance(model.loss_function, VocabParallelCausalLMLoss):
        del model._loss_function
    del model.resize_token_embeddings
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, WholeAttentions):
                del module._forward_hooks[key]
    for refusal in REFUSED:
        if isinstance(model.__dict__.get(refusal.method), RefusedWhilePatched):
            delattr(model, refusal.method)
