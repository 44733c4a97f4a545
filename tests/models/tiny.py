"""Tiny models with pairwise distinct sizes, and the step that parity tests run on both sides."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optimum_trn.patching.verify import KeepFloat64 as KeepFloat64  # parity is proven in it

# Pairwise distinct, so that no plan passes by mistaking one size for another; all divisible by 4.
SIZES = dict(
    hidden_size=40,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=72,
    vocab_size=104,
    num_hidden_layers=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def tiny_model(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> PreTrainedModel:
    """A stock model with random weights; biases and norm weights are random too, so that an error in them shows."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **overrides})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    randomise(model, seed)
    return model.eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights scaled by fan-in, everything one-dimensional around what it was, from one seeded CPU stream."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.3 * noise)


def batch(model: PreTrainedModel, rows: int = 4, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens with padding on the left and on the right, and labels that ignore it and a few more places."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1 % rows, :3] = 0
    attention_mask[2 % rows, -4:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[0, 5] = -100
    return {
        "input_ids": input_ids.masked_fill(attention_mask == 0, 0),
        "attention_mask": attention_mask,
        "labels": labels,
    }
