"""The forward of a patched model as a whole: which of its outputs stay local, and which are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from optimum_trn.parallel.collectives import gather_from_group
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sequence import SequenceGroup
from optimum_trn.patching.adapters import adopt_adapters


def calls_loss_function(model: nn.Module) -> bool:
    """Whether the class computes its loss by the function that an instance can replace, not by one of its own."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


class WholeAttentions:
    """Gathers the attention weights in the outputs of a model whose heads are sharded; a forward hook of towers.

    `head_orders` says where the stock model's heads are among those of all ranks, by the number of heads of a rank, if
    they are not simply in order.
    """

    def __init__(self, group: RankGroup, head_orders: Mapping[int, list[int]]) -> None:
        self.group = group
        self.head_orders = dict(head_orders)

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if isinstance(outputs, ModelOutput):
            self.gather(outputs)

    def gather(self, outputs: ModelOutput) -> None:
        """Puts whole weights in place of this rank's, in all stacks of layers."""
        for name, value in outputs.items():
            if isinstance(value, ModelOutput):
                self.gather(value)
            elif name.endswith("attentions") and value is not None:
                # Some towers give what attention makes instead of (rows, heads, queries, keys), and that is whole.
                outputs[name] = tuple(
                    self._of_all_heads(weights) if isinstance(weights, torch.Tensor) and weights.dim() == 4 else weights
                    for weights in value
                )

    def _of_all_heads(self, weights: torch.Tensor) -> torch.Tensor:
        gathered = gather_from_group(weights, self.group.process_group, dim=1)
        order = self.head_orders.get(weights.shape[1])
        return gathered if order is None else gathered[:, order]


class PatchedForward:
    """The forward of one model instance.

    In training with labels, only the vocabulary-parallel loss sees the logits: they stay on their ranks and
    `outputs.logits` is None, unless `needs_logits` of the loss is True; so they do in evaluation if it is False.  In
    all other cases the logits are those of the stock model, whole on every rank; so are the attention weights, if asked
    for, which `attentions` gathers, unless the towers of a composite model do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attentions: WholeAttentions | None,
        sequence: SequenceGroup | None,
    ) -> None:
        self.model = model
        self.attentions = attentions
        self.sequence = sequence
        self.wrapped = model.__dict__.get("forward")  # another library may have put its own on the instance

    @property
    def __signature__(self) -> inspect.Signature:
        # The Trainer reads off the signature which columns of a data set the model takes.
        return inspect.signature(type(self.model).forward.__get__(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adopt_adapters(self.model)
        forward = self.wrapped or type(self.model).forward.__get__(self.model)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.model.config.return_dict
        heads = self._heads()
        local_logits = bool(heads) and self._logits_stay_local(args, kwargs)
        for head in heads:
            head.gathers_output = not local_logits
        try:
            outputs = forward(*args, return_dict=True, **kwargs)
        finally:
            for head in heads:
                head.gathers_output = True
        if local_logits:
            outputs.logits = None
        if self.attentions is not None:
            self.attentions.gather(outputs)
        if self.sequence is not None:
            self._gather_hidden_states(outputs)
        return outputs if return_dict else outputs.to_tuple()

    def _gather_hidden_states(self, outputs: Any) -> None:
        for name, value in outputs.items():
            if name.endswith("hidden_states") and value is not None:
                outputs[name] = tuple(map(self._of_all_tokens, value))

    def _of_all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        assert self.sequence is not None
        length = self.sequence.length.value
        # A single token is one on every rank either way, and the first rank's is the one that counts.
        return states if states.shape[1] == length != 1 else self.sequence.gather(states)

    def _heads(self) -> list[ParallelLMHead]:
        """The parallel head of the model, and the copies of it that PEFT may have made."""
        head = self.model.get_output_embeddings()
        return [] if head is None else [inner for inner in head.modules() if isinstance(inner, ParallelLMHead)]

    def _logits_stay_local(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        loss = self.model.loss_function
        if not getattr(loss, "takes_local_logits", False):
            return False
        if getattr(loss, "needs_logits", not self.model.training):
            return False
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = self.__signature__.bind_partial(*args).arguments.get("labels")
        return labels is not None
