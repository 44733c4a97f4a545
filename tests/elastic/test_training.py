"""The least number of nodes comes from the memory model of the planner."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from optimum_trn.elastic.training import nodes_that_fit
from optimum_trn.errors import PlanError


def arguments(rows=1, micro_batches=8):
    return SimpleNamespace(per_device_train_batch_size=rows, gradient_accumulation_steps=micro_batches)


def llama(layers, hidden):
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, max_position_embeddings=2048
    )


def test_a_model_that_fits_one_core_needs_one_node():
    assert nodes_that_fit(llama(8, 256), arguments(), 6, 1) == 1


def test_a_larger_model_needs_more_nodes_and_fewer_of_those_with_more_cores():
    config = llama(32, 4096)  # 8.9e9 parameters, 16 bytes of each with AdamW in float32: 133 GiB of cores of 24
    alone, in_pairs = nodes_that_fit(config, arguments(), 32, 1), nodes_that_fit(config, arguments(), 16, 2)
    assert alone >= 6  # for the weights and their states; activations in flight come on top
    assert in_pairs == -(-alone // 2)


def test_too_few_nodes_are_refused_with_the_bytes():
    with pytest.raises(PlanError, match="no pipeline of up to 2 nodes.*GiB of 23.0"):
        nodes_that_fit(llama(32, 4096), arguments(), 2, 1)
