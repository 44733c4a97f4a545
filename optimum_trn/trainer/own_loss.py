"""A `compute_loss` of the user's sees the logits of the whole vocabulary, as it does in one process."""

from __future__ import annotations

from typing import Any

from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ..parallel.loss import VocabParallelCausalLMLoss
from ..patching import state_of

logger = logging.get_logger(__name__)

LIBRARIES = ("optimum_trn", "transformers", "trl")
"""Their own `compute_loss` takes the loss of the model, or what stands in for it (trl.py)."""


def has_own_loss(trainer: type) -> bool:
    """Whether a class of another origin overrides `compute_loss`."""
    return any("compute_loss" in vars(cls) and cls.__module__.split(".")[0] not in LIBRARIES for cls in trainer.__mro__)


def show_logits(model: Any, trainer: type) -> None:
    """Have a sharded model gather its logits in training, too, if the trainer has a `compute_loss` that may need them.

    Not with context or pipeline parallelism, where no rank has the logits of all tokens.
    """
    state = state_of(model)
    if state is None or not has_own_loss(trainer):
        return
    loss = unwrap_peft_model(model).loss_function
    if not isinstance(loss, VocabParallelCausalLMLoss) or state.config.pipeline_parallel_size > 1:
        return
    loss.needs_logits = True
    logger.info(
        f"{trainer.__name__} has a compute_loss of its own, so that every core gathers the logits of the whole "
        "vocabulary in training. If it leaves them alone, model.loss_function.needs_logits = False keeps them sharded."
    )
