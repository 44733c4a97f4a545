"""Every family, at any layout, trains exactly as the stock model does in one process."""

import pytest
import torch

from optimum_trn.patching import supported_models
from tests.distributed import run_ranks
from tests.models.parity import deviation
from tests.models.tiny import tiny_model

DEVICES = ["cpu"]
EXACT = 1e-9


def float64_deviation(rank, world_size, model_type, tensor_parallel_size, overrides):
    return deviation(tiny_model(model_type, torch.float64, **overrides), tensor_parallel_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", supported_models())
@pytest.mark.parametrize("world_size, tensor_parallel_size", [(2, 2), (4, 4), (4, 2)])
def test_losses_gradients_norm_and_weights_equal_those_of_one_process(
    model_type, world_size, tensor_parallel_size, device
):
    for result in run_ranks(float64_deviation, world_size, model_type, tensor_parallel_size, {}, device=device):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
