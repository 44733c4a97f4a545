"""Context parallelism of one stock model instance: its base model computes with this rank's tokens only."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.masking_utils import find_packed_sequence_indices

from optimum_trn.errors import PlanError
from optimum_trn.parallel.context import ContextLayout
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.patching.outputs import calls_loss_function
from optimum_trn.patching.ring import RING, ForwardPass, active_layout, current_pass, register_ring_attention
from optimum_trn.patching.stages import StagedModel
from optimum_trn.patching.wrappers import WrappingForward

OWN_POSITIONS = {"opt", "roberta", "xlm-roberta", "camembert"}
"""Model types that count positions from the padding mask or the tokens, not from the start of the row."""

TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
CACHES = ("cache", "past_key_values")


def check_context(model: PreTrainedModel) -> None:
    """Raises `PlanError` for a model whose base model is not one stack of layers that attend by the stock interface."""
    name, base = type(model).__name__, model.base_model
    reason = None
    if model.config.is_encoder_decoder or model.config.sub_configs or model.main_input_name != "input_ids":
        reason = "it reads more than one sequence of tokens"
    elif not isinstance(base, PreTrainedModel) or not model._can_set_attn_implementation():
        reason = "its attention does not go through the attention interface of transformers"
    elif "position_ids" not in inspect.signature(type(base).forward).parameters:
        reason = "it takes no position_ids, so that it would count the positions of each rank's tokens from zero"
    elif model.config.model_type in OWN_POSITIONS:
        reason = "it counts positions from the padding, which no rank sees for its own tokens alone"
    elif isinstance(getattr(base, "pooler", None), nn.Linear):
        reason = "its pooler takes the first token of what each rank holds for the first of the sequence"
    if reason is not None:
        raise PlanError(f"context_parallel_size can't be above 1 for {name}: {reason}. Leave it at 1.")


def share_context(model: PreTrainedModel, group: RankGroup, staged: StagedModel | None = None) -> None:
    """Lets each rank of `group` compute the base model for its own tokens, with ring attention between them.

    Pipeline stages hand on those of their rank; what the last one of `staged` gives is made whole.
    """
    register_ring_attention()
    instance: Any = model
    base: Any = model.base_model
    stock = model.config._attn_implementation
    model.set_attn_implementation(RING)
    base.forward = OwnTokensForward(base, group, stock, staged)
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        pooler.register_forward_pre_hook(WholeInput())
    if base is not model:
        instance.forward = LocalLossForward(model)
        if calls_loss_function(model) and _stock_loss(model.loss_function) in (ForCausalLMLoss, ForMaskedLMLoss):
            instance.loss_function = OwnTokensLoss(model.loss_function)


def unshare_context(model: PreTrainedModel) -> None:
    """Takes back what `share_context` did."""
    instance: Any = model
    base: Any = model.base_model
    if isinstance(instance.__dict__.get("forward"), LocalLossForward):
        WrappingForward.remove(model)
    loss = model.loss_function
    if isinstance(loss, OwnTokensLoss):
        if loss.wrapped is _stock_loss(loss.wrapped):
            del instance._loss_function
        else:
            instance.loss_function = loss.wrapped
    model.set_attn_implementation(base.forward.stock_attention)
    WrappingForward.remove(base)
    pooler = getattr(base, "pooler", None)
    hooks = {} if pooler is None else pooler._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, WholeInput)]:
        del hooks[key]


def _stock_loss(loss: Any) -> Any:
    return loss.stock if isinstance(loss, VocabParallelCausalLMLoss) else loss


class OwnTokensForward(WrappingForward):
    """The forward of a base model: cuts the tokens before it, and makes what it gives whole.

    Without a cache only: what generates token by token computes the same on all ranks.  Behind the base model every
    rank goes on with the whole hidden states, whatever the head; or, where the loss takes them so, with its own tokens.
    """

    def __init__(self, module: nn.Module, group: RankGroup, stock_attention: str, staged: StagedModel | None) -> None:
        super().__init__(module)
        self.group = group
        self.stock_attention = stock_attention
        self.staged = staged

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind_partial(*args, **kwargs)
        inputs = {name: value for name, value in bound.arguments.items() if name != "kwargs"}
        inputs.update(bound.arguments.get("kwargs", {}))
        if any(inputs.get(name) is not None for name in CACHES):
            return self.stock(*args, **kwargs)
        current = current_pass.get() or ForwardPass(keeps_local=False)
        token = current_pass.set(current)
        try:
            current.layout = self._layout(inputs)
            outputs = self.stock(**self._own(inputs, current.layout))
        finally:
            current_pass.reset(token)
        return self._whole(outputs, current)

    def _layout(self, inputs: dict[str, Any]) -> ContextLayout:
        tokens: Any = next(inputs[name] for name in TOKENS if inputs.get(name) is not None)
        length, mask, positions = tokens.shape[1], inputs.get("attention_mask"), inputs.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise PlanError(
                "context_parallel_size above 1 takes attention masks of two dimensions, one entry a token: masks of "
                "queries and keys are made where the tokens of the queries are. For packed rows, pass position_ids "
                "that start again with each sequence and no attention_mask."
            )
        if positions is not None and positions.dim() != 2:
            raise PlanError(
                f"context_parallel_size above 1 takes position_ids of two dimensions, not of {positions.dim()}."
            )
        bare = ContextLayout(self.group, length)
        packed = None
        if positions is not None and mask is None and not self._uses_cache(inputs):  # as in transformers
            packed = find_packed_sequence_indices(positions)
        sequences = None if packed is None else bare.padded(packed, fill=-1)
        if mask is None and bare.padded_length != length:
            mask = torch.ones((1, length), dtype=torch.bool, device=tokens.device)
        real = None if mask is None else bare.padded(mask.bool(), fill=False)
        return ContextLayout(self.group, length, real, sequences)

    def _uses_cache(self, inputs: dict[str, Any]) -> bool:
        asked = inputs.get("use_cache")
        return bool(getattr(self.module.config, "use_cache", False) if asked is None else asked)

    def _own(self, inputs: dict[str, Any], layout: ContextLayout) -> dict[str, Any]:
        own = dict(inputs)
        for name, value in inputs.items():
            if name in TOKENS and value is not None:
                own[name] = layout.cut(value)
            elif name not in ("attention_mask", "position_ids") and _has_tokens(value, layout.length):
                raise PlanError(
                    f"context_parallel_size above 1: {name} has an entry a token, and nothing says how to cut it."
                )
        tokens: Any = next(own[name] for name in TOKENS if own.get(name) is not None)
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(layout.padded_length, device=tokens.device)[None]
        own["position_ids"] = layout.cut(positions)
        # Never None, or positions that jump between chunks would be taken for packed sequences.
        ones = torch.ones((tokens.shape[0], layout.padded_length), dtype=torch.bool, device=tokens.device)
        own["attention_mask"] = ones if layout.real is None else layout.real.expand_as(ones)
        if "use_cache" in self.__signature__.parameters:
            own["use_cache"] = False
        return own

    def _whole(self, outputs: Any, current: ForwardPass) -> Any:
        layout = current.layout
        assert layout is not None
        if self.staged is not None and self.staged.hands_on:
            return outputs
        for name, value in outputs.items():
            if name == "last_hidden_state" and not current.keeps_local:
                outputs[name] = layout.gather(value)
            elif name == "hidden_states" and value is not None:
                outputs[name] = tuple(_gathered(layout, states) for states in value)
            elif name == "router_logits" and value is not None:
                outputs[name] = tuple(_gathered_flat(layout, logits) for logits in value)
        return outputs


def _has_tokens(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _gathered(layout: ContextLayout, states: Tensor) -> Tensor:
    if states.shape[1] != 2 * layout.chunk:
        raise PlanError(
            "output_hidden_states: leave sequence_parallel or context_parallel_size off to see all of them."
        )
    return layout.gather(states)


def _gathered_flat(layout: ContextLayout, logits: Tensor) -> Tensor:
    """Router logits, (batch x tokens, experts)."""
    return layout.gather(logits.view(-1, 2 * layout.chunk, logits.shape[-1])).flatten(0, 1)


class WholeInput:
    """A forward pre-hook of a pooler, which looks for the first token of the whole sequence."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        layout = active_layout()
        return args if layout is None else (layout.gather(args[0]), *args[1:])


class LocalLossForward(WrappingForward):
    """The forward of a model with a head: in training with labels, only the loss sees logits, each of its own tokens.

    `outputs.logits` is None then.  In all other cases the head computes with whole sequences, the same on every rank.
    """

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = self.__signature__.bind_partial(*args, **kwargs).arguments.get("labels")
        keeps = self.module.training and labels is not None and isinstance(self.module.loss_function, OwnTokensLoss)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.module.config.return_dict  # type: ignore[union-attr]
        token = current_pass.set(ForwardPass(bool(keeps)))
        try:
            outputs = self.stock(*args, return_dict=True, **kwargs)
        finally:
            current_pass.reset(token)
        if keeps:
            outputs.logits = None
        return outputs if return_dict else outputs.to_tuple()


class OwnTokensLoss:
    """The loss function of a model with logits of this rank's tokens: aligns whole labels, and sums over the ranks."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.shifts = _stock_loss(wrapped) is ForCausalLMLoss
        self.takes_local_logits = isinstance(wrapped, VocabParallelCausalLMLoss)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        current = current_pass.get()
        kwargs |= {"vocab_size": vocab_size, "ignore_index": ignore_index}
        if current is None or current.layout is None or not current.keeps_local:
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            return self.wrapped(logits=logits, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        target = labels if shift_labels is None else shift_labels
        assert target is not None
        if self.shifts and shift_labels is None:
            target = nn.functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
        own = current.layout.cut(target, fill=ignore_index)
        kwargs |= {"shift_labels": own, "labels": None} if self.shifts else {"labels": own}
        if num_items_in_batch is None:
            num_items_in_batch = (target != ignore_index).sum().to(logits.device)
        return current.layout.total(self.wrapped(logits=logits, num_items_in_batch=num_items_in_batch, **kwargs))
