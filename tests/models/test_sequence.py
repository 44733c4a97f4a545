"""Sequence parallelism changes where activations lie, and nothing that a model computes."""

import pytest
import torch

from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.parity import deviation
from tests.models.tiny import tiny_model

EXACT = 1e-9


def trained(rank, world_size, model_type, size, steps, overrides):
    model = tiny_model(model_type, torch.float64, **overrides)
    return deviation(model, size, steps=steps, sequence_parallel=True)


def prove(model_type, world_size, size, steps, device="cpu", **overrides):
    arguments = (model_type, size, steps, overrides)
    for result in run_ranks(trained, world_size, *arguments, device=device, environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


@pytest.mark.parametrize("size", [2, 4])
def test_llama_trains_as_in_one_process(size):
    """Of micro-batches of 10 and 12 tokens, four ranks divide one."""
    prove("llama", size, size, 20 if size == 2 else 3, attention_bias=True, mlp_bias=True)
