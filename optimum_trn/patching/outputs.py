"""The forward of a patched model as a whole: which of its outputs stay local, and which are gathered."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from optimum_trn.parallel.collectives import gather_from_group
from optimum_trn.parallel.embedding import ParallelLMHead
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss
from optimum_trn.parallel.mesh import RankGroup


class PatchedForward:
    """The forward of one model instance.

    In training with labels, only the vocabulary-parallel loss sees the logits: they stay on their ranks and
    `outputs.logits` is None.  In all other cases the logits are those of the stock model, whole on every rank; so are
    the attention weights, if asked for.
    """

    def __init__(self, model: PreTrainedModel, head: ParallelLMHead | None, group: RankGroup) -> None:
        self.model = model
        self.head = head
        self.group = group
        self.wrapped = model.__dict__.get("forward")  # another library may have put its own on the instance

    @property
    def __signature__(self) -> inspect.Signature:
        # The Trainer reads off the signature which columns of a data set the model takes.
        return inspect.signature(type(self.model).forward.__get__(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.wrapped or type(self.model).forward.__get__(self.model)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.model.config.return_dict
        local_logits = self._logits_stay_local(args, kwargs)
        if self.head is not None:
            self.head.gathers_output = not local_logits
        try:
            outputs = forward(*args, return_dict=True, **kwargs)
        finally:
            if self.head is not None:
                self.head.gathers_output = True
        if local_logits:
            outputs.logits = None
        if outputs.get("attentions") is not None:
            process_group = self.group.process_group
            outputs.attentions = tuple(
                gather_from_group(weights, process_group, dim=1) if isinstance(weights, torch.Tensor) else weights
                for weights in outputs.attentions
            )
        return outputs if return_dict else outputs.to_tuple()

    def _logits_stay_local(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self.model.training or self.head is None:
            return False
        if not isinstance(self.model.loss_function, VocabParallelCausalLMLoss):
            return False
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = self.__signature__.bind_partial(*args).arguments.get("labels")
        return labels is not None
