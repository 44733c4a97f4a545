"""A patched model sees every mask that its stock self takes, under every attention implementation."""

import copy

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, state_of
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.parity import relative
from tests.models.proof import main_kind
from tests.models.tiny import KeepFloat64, tiny_model

LENGTH = 11
CASES = [  # bloom and t5, with a bias for each head, take masks of two dimensions only; gpt_oss and gemma2 no sdpa
    ("eager", "llama bert"),
    ("sdpa", "mistral t5"),
    pytest.param("eager", "mistral gemma2 gpt_oss gpt2 bloom modernbert t5 bart", marks=pytest.mark.full),
    pytest.param("sdpa", "llama gpt2 bert modernbert bart", marks=pytest.mark.full),
]


def every_mask(two_dimensions_only):
    """By name, the arguments that say which tokens see which."""
    left, both, row = (torch.ones(3, LENGTH, dtype=torch.long) for _ in range(3))
    left[0, :4], left[2, :1] = 0, 0
    both[0, :2], both[1, -3:] = 0, 0
    row[1] = 0
    masks = {
        "none": {},
        "left padding": {"attention_mask": left},
        "padding on both sides": {"attention_mask": both},
        "a row of padding": {"attention_mask": row},
        "bool": {"attention_mask": both.bool()},
    }
    if two_dimensions_only:
        return masks
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    documents = torch.tensor([0] * 5 + [1] * 6)
    blocks = torch.stack([causal & (documents == documents[:, None]), causal, causal])[:, None]
    additive = torch.zeros(blocks.shape, dtype=torch.float64).masked_fill(~blocks, torch.finfo(torch.float64).min)
    bias = torch.randn(blocks.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return masks | {
        "bool, from each token to each": {"attention_mask": blocks},
        "float, from each token to each": {"attention_mask": additive},
        "a bias beside it": {"attention_mask": additive + bias},
        "packed": {"position_ids": torch.cat([torch.arange(5), torch.arange(6)]).expand(3, LENGTH)},
    }


def same_under_every_mask(rank, world_size, implementation, model_types):
    for model_type in model_types:
        stock = tiny_class(model_type, main_kind(model_type))
        patched = copy.deepcopy(stock)
        patch_model(patched, ParallelConfig(world_size))
        patched.to(local_device())
        state = state_of(patched)
        inputs = {
            name: value for name, value in class_batch(stock, main_kind(model_type)).items() if "mask" not in name
        }
        logits = {}
        for model in (stock, patched):
            model.set_attn_implementation(implementation)
        for name, mask in every_mask(model_type in ("bloom", "t5")).items():
            with KeepFloat64():
                expected = stock(**inputs, **mask)
                expected.loss.backward()
                here = {key: value.to(local_device()) for key, value in {**inputs, **mask}.items()}
                outputs = patched(**here)
                outputs.loss.backward()
            assert relative(outputs.loss, expected.loss) < 1e-9, (model_type, name)
            assert relative(outputs.logits, expected.logits) < 1e-9, (model_type, name)
            for parameter, value in stock.named_parameters():
                if value.grad is not None:
                    grad = patched.get_parameter(parameter).grad
                    whole = unshard_from_group(grad, state.placements[parameter], state.tp_group)
                    assert relative(whole, value.grad) < 1e-9, (model_type, name, parameter)
            patched.zero_grad()
            stock.zero_grad()
            logits[name] = expected.logits.detach()
        for name in logits.keys() - {"none", "packed"}:
            assert relative(logits[name], logits["none"]) > 1e-6, f"{model_type}: the mask {name} changes nothing"


@pytest.mark.parametrize("implementation, model_types", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("neuron", marks=pytest.mark.full)])
def test_loss_logits_and_gradients_are_the_stock_models_under_every_mask(implementation, model_types, device):
    run_ranks(same_under_every_mask, 2, implementation, model_types.split(), device=device, environment=FLOAT64)


@torch.no_grad()
def with_flex_attention(rank, world_size):
    stock = tiny_model("llama", torch.float32)
    patched = copy.deepcopy(stock)
    patch_model(patched, ParallelConfig(world_size))
    patched.set_attn_implementation("flex_attention")
    input_ids = torch.randint(3, 104, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    for name, mask in every_mask(two_dimensions_only=True).items():
        if name == "a row of padding":
            continue  # flex attention gives zero where sdpa gives a mean of all
        actual, expected = patched(input_ids=input_ids, **mask).logits, stock(input_ids=input_ids, **mask).logits
        seen = mask.get("attention_mask", torch.ones_like(input_ids)).bool()
        torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_flex_attention_answers_as_the_stock_model_does():
    """Without gradients, and on the CPU: PyTorch has no backward of it there, and compiles it for few other devices."""
    run_ranks(with_flex_attention, 2, device="cpu")
