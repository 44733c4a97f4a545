"""Sequence parallelism changes where activations lie, and nothing that a model computes."""

import copy
from contextlib import nullcontext

import pytest
import torch

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import tiny_class
from tests.models.parity import deviation
from tests.models.proof import proof
from tests.models.tiny import KeepFloat64, batch, tiny_model

EXACT = 1e-9
DECODERS = (
    "llama mistral granite olmo smollm3 gemma gemma2 gemma3_text qwen2 qwen3 cohere stablelm starcoder2 phi phi3 gpt2 "
    "gpt_bigcode gpt_neo gptj gpt_neox opt bloom falcon olmo2 mixtral qwen3_moe olmoe gpt_oss deepseek_v3 cohere2 "
    "exaone4 hyperclovax persimmon"
).split()


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


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "mixtral"])  # Conv1D, an MLP in the layer itself, experts
def test_other_blocks_train_as_in_one_process(model_type):
    """The batches of the proof have 11 tokens, and their hidden states and attention weights are compared, too.

    On the simulated cores; all families are proven on the CPU in test_layouts.py.
    """
    arguments = (model_type, "causal", 2, True)
    for result in run_ranks(proof, 2, *arguments, device="neuron", environment=FLOAT64):
        assert result["error"] < EXACT, result


def replicas(rank, world_size):
    def recompute(model):
        model.gradient_checkpointing_enable(
            dict(use_reentrant=False, context_fn=lambda: (nullcontext(), KeepFloat64()))
        )

    return deviation(tiny_model("qwen3"), 2, steps=3, sequence_parallel=True, after_patching=recompute)


def test_data_parallel_replicas_with_recomputation_train_as_in_one_process():
    for result in run_ranks(replicas, 4, device="cpu", environment=FLOAT64):
        assert max(result.loss, result.norm, result.gradients, result.weights) < EXACT, result
        assert not result.unequal_replicas


def behaviour(rank, world_size):
    config = ParallelConfig(world_size, sequence_parallel=True)
    stock = tiny_model("llama", torch.float32, num_key_value_heads=2)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, config)
    assert state_of(patched).config == config and "model.layers.*: SequenceSharded" in str(report)
    runs = []
    patched.model.layers[1].input_layernorm.register_forward_hook(lambda _, args, output: runs.append(output.shape[1]))
    patched.to(local_device())
    rows = batch(stock, length=11)

    def same(**inputs):
        here = {name: tensor.to(local_device()) for name, tensor in inputs.items()}
        close = dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(patched(**here).logits.cpu(), stock(**inputs).logits, **close)

    same(**rows)
    assert runs == [-(-11 // world_size)], "the norms are to see a run of the sequence only"
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    same(input_ids=rows["input_ids"][:1], position_ids=packed)
    blocks = torch.tril(torch.ones(11, 11, dtype=torch.bool)) & (
        torch.arange(11) // 5 == torch.arange(11)[:, None] // 5
    )
    same(input_ids=rows["input_ids"], attention_mask=blocks.expand(4, 1, 11, 11))
    prompt = rows["input_ids"][:2, 5:10]
    expected = stock.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    actual = patched.generate(input_ids=prompt.to(local_device()), max_new_tokens=6, do_sample=False)
    assert torch.equal(actual.cpu(), expected)

    twin = copy.deepcopy(patched)
    here = {name: tensor.to(local_device()) for name, tensor in rows.items()}
    loss = patched.train()(**here).loss
    other = {name: tensor[:, :6] for name, tensor in here.items()}
    twin.train()(**other).loss.backward()  # whose length is not that of the model it was copied from
    loss.backward()
    unpatch_model(patched)
    for mine, theirs in zip(patched.modules(), stock.modules(), strict=True):
        assert type(mine) is type(theirs) and "forward" not in mine.__dict__ and not mine._forward_pre_hooks


@pytest.mark.parametrize("device, size", [("cpu", 2), ("neuron", 4)])
def test_masks_packed_sequences_and_generation_are_those_of_the_stock_model(device, size):
    run_ranks(behaviour, size, device=device)


def refused(rank, world_size):
    model = tiny_class("bert", "masked", torch.float32)
    with pytest.raises(PlanError, match="sequence_parallel=True is for decoders"):
        patch_model(model, ParallelConfig(world_size, sequence_parallel=True))
    assert state_of(model) is None
    with pytest.raises(MeshError, match="of which there is one"):
        ParallelConfig(sequence_parallel=True)


def test_what_has_no_sequence_to_share_is_refused():
    run_ranks(refused, 2, device="cpu")
