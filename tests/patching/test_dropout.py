"""Dropout draws the same masks on all ranks for what all ranks hold, and others for what is sharded."""

import copy

import pytest
import torch
import torch.distributed as dist

from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class


def gpt2():
    """A model with dropout in the attention, after each block and after the embedding."""
    model = tiny_class("gpt2", "causal", torch.float32)
    for block in model.transformer.h:
        block.attn.attn_dropout.p, block.attn.resid_dropout.p, block.mlp.dropout.p = 0.5, 0.3, 0.3
    model.transformer.drop.p = 0.2
    return model


def on_all_ranks(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.detach().contiguous())
    return others


def gradients(model, inputs):
    model.zero_grad()
    torch.manual_seed(5)
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def masks(rank, world_size, sequence_parallel):
    stock = gpt2()
    model = copy.deepcopy(stock)
    model.set_attn_implementation("eager")
    patch_model(model, ParallelConfig(world_size, sequence_parallel))
    model.to(local_device()).train()
    inputs = {name: value.to(local_device()) for name, value in class_batch(stock, "causal").items()}
    torch.manual_seed(5)
    outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
    for states in outputs.hidden_states:
        assert all(torch.equal(other, states) for other in on_all_ranks(states)), "replicas have gone apart"
    weights = outputs.attentions[0]
    heads = (weights == 0).chunk(world_size, dim=1)
    assert not torch.equal(heads[0], heads[1]), "two ranks have drawn the same mask for different heads"
    after = torch.rand(3, device=local_device())
    assert all(torch.equal(other, after) for other in on_all_ranks(after)), "the common stream has been lost"

    first = gradients(model, inputs)
    again = gradients(model, inputs)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    recomputed = gradients(model, inputs)
    for name, placement in state_of(model).placements.items():
        if name not in first:
            continue
        assert torch.equal(first[name], again[name]), name
        torch.testing.assert_close(recomputed[name], first[name], rtol=1e-4, atol=1e-6)
        if placement.dim is None:
            assert all(torch.equal(other, first[name]) for other in on_all_ranks(first[name])), name
    unpatch_model(model)
    assert all("forward" not in module.__dict__ and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_masks_are_common_where_activations_are_and_own_where_they_are_sharded(sequence_parallel, device):
    run_ranks(masks, 2, sequence_parallel, device=device)
