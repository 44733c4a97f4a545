"""Dropout draws the same masks on all ranks for what all ranks hold, and others for what is sharded."""

import copy

import pytest
import torch
import torch.distributed as dist

from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import NEURON_FIRST, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.proof import main_kind


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
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


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


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_masks_are_common_where_activations_are_and_own_where_they_are_sharded(sequence_parallel, device):
    run_ranks(masks, 2, sequence_parallel, device=device)


def with_dropout(model_type):
    """A model with every dropout on: layers of it, and rates that a forward or an attention function reads."""
    model = tiny_class(model_type, main_kind(model_type), torch.float32)
    for owner in (model.config, *model.modules()):
        rates = [name for name, value in vars(owner).items() if "drop" in name and isinstance(value, float)]
        for name in (*rates, *(["p"] if isinstance(owner, torch.nn.Dropout) else [])):
            setattr(owner, name, 0.0 if "layerdrop" in name else 0.3)
    return model


def inputs_of_row_wise_layers(model):
    """What the blocks compute in the next forward, filled in by it."""
    inputs = {}
    for name, module in model.named_modules():
        if type(module).__name__.startswith("RowParallel"):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach().clone()}))
    return inputs


def own_masks(rank, world_size, model_types):
    """With equal shards on all ranks, the blocks compute the same there, but for the masks that they draw."""
    for model_type in model_types.split():
        model = with_dropout(model_type)
        inputs = {name: value.to(local_device()) for name, value in class_batch(model, main_kind(model_type)).items()}
        patch_model(model, ParallelConfig(world_size))
        model.to(local_device())
        replicated = [name for name, placement in state_of(model).placements.items() if placement.dim is None]
        for name, parameter in model.named_parameters():
            if name not in replicated:
                dist.broadcast(parameter.data, 0)
        leaving = inputs_of_row_wise_layers(model)
        with torch.no_grad():
            model.train()(**inputs)
        attentions = {name for name in leaving if "att" in name.lower()}
        assert len(attentions) >= 2, leaving.keys()
        equal = {name for name, states in leaving.items() if torch.equal(*on_all_ranks(states))}
        assert not equal & attentions, f"{model_type}: two ranks have drawn the same masks"
        assert model_type not in ("t5", "bart") or not equal, "their feed-forward parts have dropout, too"

        first, again = gradients(model, inputs), gradients(model, inputs)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        recomputed = gradients(model, inputs)
        for name, gradient in first.items():
            assert torch.equal(gradient, again[name]), (model_type, name)
            torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6)
            if name in replicated:
                assert torch.equal(*on_all_ranks(gradient)), f"{model_type}: {name} has other gradients elsewhere"


@pytest.mark.parametrize(
    "device, model_types",
    [
        ("cpu", "llama bert t5"),
        pytest.param("neuron", "llama bert t5 bart", marks=pytest.mark.full),
        pytest.param(
            "cpu",
            "qwen3 cohere phi gpt2 gpt_neo gptj gpt_neox gpt_bigcode opt bloom gpt_oss deepseek_v3 roberta distilbert "
            "electra modernbert deberta-v2 bart vit",
            marks=pytest.mark.full,
        ),
    ],
)
def test_attention_draws_own_masks_in_every_kind_of_model(device, model_types):
    """Decoders, encoders and encoder-decoders; with sdpa, the masks are drawn within it."""
    run_ranks(own_masks, 2, model_types, device=device)
