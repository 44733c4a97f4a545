"""Recomputation of activations in the backward pass: of whole layers, of some of them, or of the core of attention.

The attention core alone (scores, softmax, dropout and their product with the values) is selective recomputation after
Korthikanti et al. 2022 (arXiv:2205.05198, section 5): where scores are kept at all, they are most of the memory and
little of the arithmetic of a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import ParallelConfig
from optimum_trn.patching.wrappers import Recomputed, first_part

PREFIX = "recomputed_"
"""What comes before the name of an attention implementation of transformers whose core is recomputed."""

CORES = ("eager", "sdpa")
"""The implementations that keep activations of the core: flex attention and the ring recompute them themselves."""


def check_recompute(model: PreTrainedModel, config: ParallelConfig) -> None:
    """Raises `PlanError` for a model in which what `config` wants to recompute can't be told from the rest."""
    what, name = config.recompute, type(model).__name__
    if what is None:
        return
    if what != "selective":
        layers = _layers(model)
        if not layers:
            raise PlanError(
                f"recompute={what!r}: {name} has no layers that transformers can recompute. Leave it unset."
            )
        if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
            raise PlanError(f"{name} recomputes its layers already: call model.gradient_checkpointing_disable() first.")
        return
    stock = model.config._attn_implementation
    if not model._can_set_attn_implementation():
        raise PlanError(
            f"recompute='selective': the attention of {name} does not go through the attention "
            "interface of transformers, so that its core can't be told from the rest. Use 'full' or a ratio of layers."
        )
    if config.context_parallel_size > 1 or stock not in CORES:
        stock = "ring attention" if config.context_parallel_size > 1 else stock
        raise PlanError(
            f"recompute='selective' is for the attention implementations {' and '.join(CORES)}; {stock} "
            "keeps no scores, so there is nothing to gain. Use 'full', a ratio of layers, or leave it unset."
        )


def recompute(model: PreTrainedModel, what: str | float | None) -> None:
    """Lets training recompute `what` (a value of `ParallelConfig.recompute`) of the layers here."""
    if what == "selective":
        for core in CORES:
            ALL_ATTENTION_FUNCTIONS.register(PREFIX + core, RecomputedCore(core))
            ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + core, ALL_MASK_ATTENTION_FUNCTIONS[core])
        model.set_attn_implementation(PREFIX + model.config._attn_implementation)
    elif what is not None:
        for layer in first_part(_layers(model), 1.0 if what == "full" else float(what)):
            Recomputed().apply(layer, None)  # type: ignore[arg-type]


def keep_activations(model: PreTrainedModel, what: str | float | None) -> None:
    """Takes back what `recompute` did."""
    if what == "selective":
        model.set_attn_implementation(model.config._attn_implementation.removeprefix(PREFIX))
    elif what is not None:
        for layer in _layers(model):
            if "_gradient_checkpointing_func" in layer.__dict__:
                Recomputed().revert(layer)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class RecomputedCore:
    """An attention function of transformers that keeps queries, keys and values only; another computes the rest."""

    def __init__(self, core: str) -> None:
        self.core = core

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = _eager_attention(module) if self.core == "eager" else ALL_ATTENTION_FUNCTIONS[self.core]
        if not (module.training and torch.is_grad_enabled()):
            return function(module, *args, **kwargs)
        return checkpoint(function, module, *args, use_reentrant=False, **kwargs)


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a stock module, which transformers defines beside its class."""
    for owner in type(module).__mro__:
        function = getattr(sys.modules[owner.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise PlanError(
        f"recompute='selective': {type(module).__name__} has no eager attention function of its own. "
        "Load the model with attn_implementation='sdpa'."
    )
