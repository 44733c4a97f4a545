"""What the trainers of TRL need on sharded models: log-probabilities without whole logits, and a sharded reference."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import Trainer
from transformers.trainer_utils import unwrap_peft_model

from ..errors import PlanError, UnsupportedModelError
from ..parallel import ParallelConfig
from ..parallel.loss import VocabParallelCausalLMLoss
from ..parallel.token_statistics import TokenStatistics, token_statistics
from ..patching.outputs import calls_loss_function
from .arguments import degrees_of

ONLINE = {"GRPOTrainer", "RLOOTrainer"}
"""Trainers of TRL that generate what they train on."""

PREFERENCE = {"DPOTrainer", "RewardTrainer"}
"""Those that train on pairs of rows."""


def is_of_trl(trainer: type) -> bool:
    """Whether a class comes from TRL, or from a class that does."""
    return any(base.__module__.partition(".")[0] == "trl" for base in trainer.__mro__)


class StatisticsLoss:
    """Stands in for a model's loss function during one forward pass, and keeps the statistics of its tokens."""

    takes_local_logits = True
    needs_logits = False
    """Nothing else looks at the logits, so that they stay on their ranks in evaluation, too."""

    def __init__(self, stock: Any, temperature: float) -> None:
        self.group = stock.group if isinstance(stock, VocabParallelCausalLMLoss) else None
        self.temperature = temperature
        self.statistics: TokenStatistics | None = None

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
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if logits.shape[:-1] != shift_labels.shape:
            raise UnsupportedModelError(
                f"The model gives its loss function logits of {tuple(logits.shape[:-1])} tokens for labels of "
                f"{tuple(shift_labels.shape)}, so TRL's log-probabilities of single tokens can't be told on this mesh."
            )
        target = shift_labels.to(logits.device).flatten()
        group = None if logits.shape[-1] == vocab_size else self.group
        self.statistics = token_statistics(
            logits.flatten(0, -2) / self.temperature, target, vocab_size, group, ignore_index
        )
        items = (target != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return -self.statistics.log_probs.sum() / items


class FusedHeadForward:
    """The forward of a model that TRL has given its fused head, with `fused_lm_head=True` on any mesh.

    TRL multiplies hidden states by `lm_head.weight`, of which a rank has its shard, or nothing yet.  This calls the
    model's own forward with a loss function that keeps the statistics of each token (token_statistics.py), so that
    logits are scaled and capped as the model does it, and stay on their ranks.  `forward` is what TRL found.
    """

    def __init__(self, model: Any, forward: Any, temperature: float, output_class: type) -> None:
        self.model, self.forward, self.temperature, self.output_class = model, forward, temperature, output_class
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return self.forward(*args, **kwargs)
        shifted = kwargs.get("shift_labels")
        target = kwargs["labels"][:, 1:] if shifted is None else shifted
        stock = self.model.loss_function
        loss = StatisticsLoss(stock, self.temperature)
        self.model.loss_function = loss
        try:
            outputs = self.forward(*args, **{**kwargs, "use_cache": False, "return_dict": True})
        finally:
            self.model.loss_function = stock
        assert loss.statistics is not None
        mask = target != -100
        shape = (mask.shape[0], -1)
        per_token = {
            name: value.view(shape)[:, : mask.shape[1]].to(torch.float32 if value.is_floating_point() else value.dtype)
            for name, value in vars(loss.statistics).items()
        }
        return self.output_class(
            loss=outputs.loss, label_mask=mask, aux_loss=getattr(outputs, "aux_loss", None), **per_token
        )


def adopt_fused_head(model: Any) -> None:
    """Replace the forward that TRL's `add_fused_lm_head` has put on a model, if it has, by `FusedHeadForward`.

    Raises `UnsupportedModelError` for a model with a loss of its own, `PlanError` for `cast_lm_head_to_fp32`.
    """
    forward = getattr(model.__dict__.get("forward"), "__func__", None)
    if forward is None or forward.__code__.co_name != "_fused_forward":
        return
    found = inspect.getclosurevars(forward).nonlocals
    if not calls_loss_function(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a loss of its own, so TRL's log-probabilities of single tokens can't be told "
            "where its head is sharded. Train it in one process."
        )
    if found["cast_lm_head_to_fp32"]:
        raise PlanError("cast_lm_head_to_fp32=True is for one process. On several, set dtype=torch.float32 instead.")
    from trl.trainer.utils import FusedCausalLMOutput

    model.forward = FusedHeadForward(model, found["original_forward"], found["temperature"], FusedCausalLMOutput)


class TRLMixin:
    """The part of `NeuronTrainerMixin` that only trainers of TRL need; all others are left alone.

    Raises `PlanError` for what TRL can't do with a model that ranks share.
    """

    model: Any
    args: Any
    mesh: DeviceMesh | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_of_trl(type(self)) and self.mesh is not None:
            for model in (self.model, getattr(self, "ref_model", None)):
                if model is not None:
                    adopt_fused_head(unwrap_peft_model(model))

    @property
    def ref_model(self) -> Any:
        """The frozen model that TRL's preference trainers compare with; it is sharded as the policy is."""
        if "ref_model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'ref_model'")
        return vars(self)["ref_model"]

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        if isinstance(model, nn.Module) and self.mesh is not None:
            self._shard(model)
        vars(self)["ref_model"] = model

    @property
    def parallel_config(self) -> ParallelConfig:
        raise NotImplementedError

    @property
    def is_sharded(self) -> bool:
        raise NotImplementedError

    def _shard(self, model: Any) -> None:
        raise NotImplementedError

    @property
    def _parts_of_batch(self) -> int:
        """2 where a batch has all chosen rows before all rejected ones."""
        return 2 if PREFERENCE & {base.__name__ for base in type(self).__mro__} else 1

    @property
    def _evaluates_means(self) -> bool:
        """Whether evaluation takes the mean over the labels of a rank, as all of TRL's does."""
        return is_of_trl(type(self))

    def _with_labels_that_count(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs with the labels that a loss of TRL is a mean over: no token predicts the first of a row."""
        if not is_of_trl(type(self)) or "labels" not in inputs:
            return inputs
        return {**inputs, "labels": inputs["labels"][..., 1:]}

    def _refuse_of_trl(self) -> None:
        """Raise for what TRL can't do with a shared model, before that is sharded."""
        if not is_of_trl(type(self)) or self.mesh is None:
            return
        if getattr(self.args, "entropy_coef", 0.0) or getattr(self.args, "use_adaptive_entropy", False):
            raise PlanError(
                "entropy_coef and use_adaptive_entropy are for one process: on several, the entropy of TRL's fused "
                "head is a metric and has no gradient."
            )
        if not self.is_sharded:
            return
        names = {base.__name__ for base in type(self).__mro__}
        if online := names & ONLINE:
            raise PlanError(
                f"{min(online)} seeds every process by itself, to have completions of its own: ranks that share a "
                f"model would train on different rows, so {degrees_of(self.parallel_config)} is not for it. Leave the "
                "degrees at 1 for data parallelism."
            )
        if getattr(self.args, "precompute_ref_log_probs", False):
            raise PlanError(
                "precompute_ref_log_probs=True keeps what it computes under a hash of the reference's weights, of "
                "which each rank has other shards. Leave it False: the reference model is sharded as the policy is."
            )
        for degree in ("pipeline_parallel_size", "context_parallel_size"):
            size = getattr(self.parallel_config, degree)
            if size > 1:
                raise PlanError(
                    f"TRL computes its losses from the log-probabilities of whole rows on every rank, which "
                    f"{degree}={size} spreads over several. Use tensor_parallel_size and data parallelism."
                )


functools.update_wrapper(TRLMixin.__init__, Trainer.__init__)  # which has the arguments that a user looks for
