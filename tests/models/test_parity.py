"""Every family, at any layout, trains exactly as the stock model does in one process."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from optimum_trn.parallel.collectives import copy_to_group, reduce_from_group
from optimum_trn.parallel.linear import RowParallelLinear
from tests.devices import FLOAT64, NEURON_FIRST
from tests.distributed import run_ranks
from tests.models.families import tiny_class
from tests.models.parity import deviation
from tests.models.test_sequence import DECODERS
from tests.models.tiny import KeepFloat64, tiny_model

EXACT = 1e-9
FAMILIES = ["llama", "qwen3"]  # trained over many steps; test_families.py proves one step of all
LAYOUTS = [(2, 2), (4, 2), pytest.param(4, 4, marks=pytest.mark.full)]  # world size, tensor-parallel size

BIASED = dict(attention_bias=True, mlp_bias=True)
VARIANTS = {  # by family: what its config can switch, beyond grouped-query attention and an untied head
    "llama": dict(biased=BIASED, tied=dict(tie_word_embeddings=True), multi_head=dict(num_key_value_heads=8)),
    "mistral": dict(window=dict(sliding_window=4), tied=dict(tie_word_embeddings=True)),
    "qwen2": dict(tied=dict(tie_word_embeddings=True), eager=dict(attn_implementation="eager")),
    "qwen3": dict(biased=dict(attention_bias=True, tie_word_embeddings=True)),
}


def trained(rank, world_size, model_type, tensor_parallel_size, overrides=None, dtype=torch.float64, **options):
    return deviation(tiny_model(model_type, dtype, **(overrides or {})), tensor_parallel_size, **options)


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("world_size, tensor_parallel_size", LAYOUTS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_losses_gradients_norm_and_weights_equal_those_of_one_process(
    model_type, world_size, tensor_parallel_size, device
):
    for result in run_ranks(trained, world_size, model_type, tensor_parallel_size, device=device, environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


def trained_family(rank, world_size, model_type):
    # AdamW's usual eps makes whole steps of the rounding of gradients that are zero in theory, as of biases of keys.
    return deviation(tiny_class(model_type, "causal"), world_size, max_norm=0.05, eps=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("model_type", [name for name in DECODERS if name not in FAMILIES])
def test_every_decoder_family_trains_as_in_one_process_over_many_steps(model_type):
    for result in run_ranks(trained_family, 2, model_type, device="cpu", environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("model_type, variant", [(family, name) for family, vs in VARIANTS.items() for name in vs])
def test_every_switch_of_a_family_keeps_parity(model_type, variant, device):
    for result in run_ranks(
        trained, 2, model_type, 2, VARIANTS[model_type][variant], steps=5, device=device, environment=FLOAT64
    ):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_float32_agrees_to_its_rounding(model_type, device):
    for result in run_ranks(trained, 2, model_type, 2, dtype=torch.float32, device=device, environment=FLOAT64):
        assert max(result.loss, result.first_gradients) < 1e-5, result
        assert result.close_weights > 0.999
        assert not result.unequal_replicas


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16_loss_is_within_two_percent(model_type, device):
    for result in run_ranks(
        trained, 2, model_type, 2, dtype=torch.bfloat16, steps=5, device=device, environment=FLOAT64
    ):
        assert result.loss < 0.02, result
        assert not result.unequal_replicas


def recompute(model):
    # The engine turns modes off, so that the recomputation has to bring its own.
    model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=lambda: (nullcontext(), KeepFloat64())))


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_recomputed_activations_give_the_same_gradients(device):
    for result in run_ranks(
        trained, 2, "qwen3", 2, steps=2, after_patching=recompute, device=device, environment=FLOAT64
    ):
        assert max(result.loss, result.norm, result.gradients) < EXACT, result


# Four planted errors.  Only the last one shows in the loss, and only since biases are random.


def forget_the_input_gradient_sum(model):
    model.model.layers[1].self_attn._forward_pre_hooks.clear()


def forget_the_norm_gradient_sum(model):
    del model.model.layers[1].self_attn.q_norm.forward


class DoubledBackward(RowParallelLinear):
    def forward(self, input):
        group = self.group.process_group
        return copy_to_group(reduce_from_group(F.linear(input, self.weight), group), group) + self.bias


class BiasOfEveryRank(RowParallelLinear):
    def forward(self, input):
        return reduce_from_group(F.linear(input, self.weight, self.bias), self.group.process_group)


def double_the_row_wise_backward(model):
    model.model.layers[1].self_attn.o_proj.__class__ = DoubledBackward


def add_the_bias_on_every_rank(model):
    model.model.layers[1].self_attn.o_proj.__class__ = BiasOfEveryRank


@pytest.mark.parametrize(
    "plant", [forget_the_input_gradient_sum, forget_the_norm_gradient_sum, double_the_row_wise_backward]
)
def test_a_planted_gradient_error_is_caught_though_the_loss_is_right(plant):
    overrides = dict(attention_bias=True)
    for result in run_ranks(
        trained, 2, "qwen3", 2, overrides, steps=1, after_patching=plant, device="cpu", environment=FLOAT64
    ):
        assert result.loss < EXACT
        assert result.gradients > 1e-2, result


def test_a_bias_added_on_every_rank_is_caught():
    options = dict(steps=1, after_patching=add_the_bias_on_every_rank, device="cpu", environment=FLOAT64)
    for result in run_ranks(trained, 2, "qwen3", 2, dict(attention_bias=True), **options):
        assert result.loss > 1e-4
        assert result.gradients > 1e-2, result
