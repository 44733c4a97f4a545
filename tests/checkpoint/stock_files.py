"""Stock checkpoints of tiny models, and what a sharded model holds, gathered for comparison."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import state_of
from tests.models.tiny import tiny_model


def saved(directory: Path, model_type: str = "llama", max_shard_size: str = "50GB", **overrides) -> PreTrainedModel:
    """A float32 model with random weights, saved by transformers itself."""
    model = tiny_model(model_type, torch.float32, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def whole_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, unsharded, on the CPU; a collective over the tensor-parallel group."""
    state = state_of(model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {
        name: (
            tensor.detach().cpu()
            if state is None or name not in state.placements
            else unshard_from_group(tensor.detach(), state.placements[name], state.tp_group).cpu()
        )
        for name, tensor in tensors.items()
    }


def differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names under which two sets of tensors are not bit-equal."""
    assert actual.keys() == expected.keys()
    return [
        name
        for name in expected
        if actual[name].dtype != expected[name].dtype or not torch.equal(actual[name], expected[name])
    ]
