"""Sizes that the tensor-parallel size does not divide: replicated key-value heads, and zeros that stay zeros."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimum_trn.checkpoint import save_pretrained
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import families
from tests.models.parity import deviation
from tests.models.proof import proofs
from tests.models.tiny import batch, tiny_model

EXACT = 1e-9
ODD = dict(intermediate_size=97, vocab_size=97)
SHAPES = [  # tensor-parallel size, query heads, key-value heads
    (2, 9, 3),  # as SmolLM2-135M
    (3, 8, 2),
    (4, 6, 3),
    (4, 8, 2),  # each key-value head on two ranks
    (4, 6, 2),  # and one of these with padded queries
    (3, 4, 4),
    (2, 3, 1),
]


def shape(num_heads, num_kv_heads, **overrides):
    heads = dict(hidden_size=5 * num_heads, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    return {**ODD, **heads, **overrides}


def trained(rank, world_size, model_type, overrides, steps):
    return deviation(tiny_model(model_type, torch.float64, **overrides), world_size, steps=steps)


@pytest.mark.parametrize("size, num_heads, num_kv_heads", SHAPES)
def test_every_shape_trains_as_in_one_process(size, num_heads, num_kv_heads):
    switches = dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=num_heads % 2 == 1)
    overrides = shape(num_heads, num_kv_heads, **switches)
    steps = 20 if size == 2 else 3
    for result in run_ranks(trained, size, "llama", overrides, steps, device="cpu", environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_heads_are_right_where_heads_are_shared_or_padding(device):
    overrides = shape(6, 1, attention_bias=True, pad_token_id=96)
    for result in run_ranks(trained, 2, "qwen3", overrides, 3, device=device, environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


def close(actual, expected):
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)


def behaviour(rank, world_size, overrides, directory):
    config = ParallelConfig(world_size)
    stock = tiny_model("llama", torch.float32, **overrides, attn_implementation="eager")
    patched = copy.deepcopy(stock)
    patch_model(patched, config)
    patched.to(local_device())
    rows = batch(stock)
    here = {name: tensor.to(local_device()) for name, tensor in rows.items()}
    loss = patched.train()(**here).loss
    for twin in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert torch.equal(twin(**here).loss, loss)
    patched.eval()
    options = dict(output_hidden_states=True, output_attentions=True)
    mine, theirs = patched(**here, **options), stock(**rows, **options)
    for name in ("loss", "logits"):
        close(mine[name], theirs[name])
    for actual, expected in zip(
        mine.attentions + mine.hidden_states, theirs.attentions + theirs.hidden_states, strict=True
    ):
        close(actual, expected)

    prompt = {"input_ids": rows["input_ids"][:2, 4:9]}
    for how in (dict(do_sample=False), dict(do_sample=False, num_beams=3)):
        expected = stock.generate(**prompt, max_new_tokens=6, **how)
        assert torch.equal(
            patched.generate(input_ids=prompt["input_ids"].to(local_device()), max_new_tokens=6, **how).cpu(), expected
        )

    save_pretrained(patched, directory)
    tensors = load_file(f"{directory}/model.safetensors")
    for name, tensor in stock.state_dict().items():
        assert name not in tensors or torch.equal(tensors[name], tensor), name
    loaded = NeuronModelForCausalLM.from_pretrained(directory, config)
    assert state_of(loaded).placements == state_of(patched).placements
    for (name, first), second in zip(loaded.named_parameters(), patched.parameters(), strict=True):
        assert torch.equal(first, second), name
    torch.manual_seed(3)
    fresh = NeuronModelForCausalLM.from_config(stock.config, config)
    torch.manual_seed(3)
    for name, tensor in AutoModelForCausalLM.from_config(stock.config).named_parameters():
        placement = state_of(fresh).placements[name]
        assert torch.equal(
            unshard_from_group(fresh.get_parameter(name), placement, state_of(fresh).tp_group).cpu(), tensor
        )

    patched.train()(**here).loss.backward()
    unpatch_model(patched)
    for (name, mine), theirs in zip(patched.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(mine.cpu(), theirs), name
    for mine, theirs in zip(patched.modules(), stock.modules(), strict=True):
        assert mine.extra_repr() == theirs.extra_repr() and "forward" not in mine.__dict__
    layers = zip(patched.model.layers, stock.model.layers, strict=True)
    assert all(a.self_attn.num_key_value_groups == b.self_attn.num_key_value_groups for a, b in layers)


@pytest.mark.parametrize(
    "size, overrides, device",
    [(2, shape(3, 3), "cpu"), (4, shape(6, 2, tie_word_embeddings=True), "cpu")],
    ids=["padded", "shared"],
)
def test_evaluation_generation_files_and_unpatching_know_nothing_of_padding(size, overrides, device, tmp_path):
    run_ranks(behaviour, size, overrides, str(tmp_path), device=device)


def all_classes(rank, world_size, model_types):
    return {
        f"{model_type} {kind}": result
        for model_type in model_types
        for kind, result in proofs(rank, world_size, model_type, world_size).items()
    }


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.full) for name in families()],  # of the main class: test_layouts.py
)
def test_three_ranks_divide_the_sizes_of_no_family_and_change_nothing(model_type):
    for results in run_ranks(all_classes, 3, [model_type], device="cpu", environment=FLOAT64):
        assert results
        for name, result in results.items():
            assert result["error"] < EXACT, (name, result)
