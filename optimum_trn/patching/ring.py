"""Ring attention as one of transformers' attention implementations: its mask and its attention function."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optimum_trn.errors import PlanError
from optimum_trn.parallel.context import ContextLayout
from optimum_trn.parallel.ring import RingMask, Scoring, ring_attention

RING = "ring"
"""The name of ring attention among transformers' attention implementations."""


@dataclass
class ForwardPass:
    """One forward pass: where its tokens are once they are cut, and whether they stay so behind the base model."""

    keeps_local: bool
    layout: ContextLayout | None = None


current_pass: ContextVar[ForwardPass | None] = ContextVar("context_parallel_pass", default=None)


def active_layout() -> ContextLayout | None:
    current = current_pass.get()
    return None if current is None else current.layout


def register_ring_attention() -> None:
    """Makes `RING` known to transformers; a model attends by it once its config says so."""
    ALL_ATTENTION_FUNCTIONS.register(RING, ring_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RING, ring_mask)


def ring_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function of the implementation `RING`, as transformers.masking_utils calls it.

    Where tokens are cut it gives a `RingMask`, which the layers pass on to their attention, whatever it is.
    """
    layout = active_layout()
    if layout is None:
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("use_vmap"):
        raise PlanError("context_parallel_size above 1: the model adds a mask of its own to its attention.")
    return RingMask(
        layout,
        kwargs["batch_size"],
        kwargs["mask_function"],
        is_causal=kwargs.get("allow_is_causal_skip", True),
        window=kwargs.get("local_size"),
    )


def ring_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the implementation `RING`, as transformers' layers call it; returns no weights."""
    if not isinstance(attention_mask, RingMask):
        if active_layout() is not None:
            raise PlanError(f"{type(module).__name__} attends with a mask that does not say where its tokens are.")
        if s_aux is not None or softcap is not None:
            raise PlanError(
                f"{type(module).__name__}: its attention needs all tokens here, as in generation, and has sinks or a "
                "cap that only ring attention computes. Load the model without context_parallel_size for it."
            )
        stock: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        kwargs["position_bias"] = position_bias
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if position_bias is not None:
        raise PlanError(f"{type(module).__name__} adds a position bias, which ring attention does not know.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seed = int(torch.randint(2**62, ())) if dropout else 0
    output = ring_attention(query, key, value, attention_mask, Scoring(scale, softcap, dropout, seed), s_aux)
    return output.transpose(1, 2).contiguous(), None
