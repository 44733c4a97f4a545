"""What is recomputed changes the memory that training takes, and no number of it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, RwkvConfig

from optimum_trn import ParallelConfig, patch_model, unpatch_model
from optimum_trn.errors import MeshError, PlanError
from tests.devices import local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class


def step(model, inputs):
    """The loss, every gradient, and how many bytes the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
        own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
        loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, sum(size for pointer, size in kept.items() if pointer not in own)


def compare(rank, world_size, family, implementation, what):
    stock = tiny_class(family, "causal", torch.float32, attn_implementation=implementation)
    for module in stock.modules():  # with dropout, so that a core that draws other numbers shows
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.3
    inputs = {name: value.to(local_device()) for name, value in class_batch(stock, "causal", length=32).items()}
    results = {}
    for setting in (None, what):
        model = copy.deepcopy(stock)
        patch_model(model, ParallelConfig(world_size, recompute=setting))
        model.to(local_device()).train()
        results[setting] = step(model, inputs)
        unpatch_model(model)
    (loss, gradients, kept), (other_loss, other_gradients, less) = results[None], results[what]
    assert torch.equal(loss, other_loss)
    for name, gradient in gradients.items():
        assert torch.equal(other_gradients[name], gradient), name
    again = step(model.to(local_device()), inputs)  # unpatched: everything is kept once more
    assert again[2] > less
    return kept, less


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("family", "implementation", "what"),
    [
        ("llama", "eager", "selective"),
        ("gpt2", "eager", "selective"),
        ("llama", "sdpa", "selective"),
        ("llama", "sdpa", 0.5),
        ("llama", "sdpa", "full"),
    ],
)
def test_gradients_are_the_same_and_less_is_kept(family, implementation, what, ranks):
    for kept, less in run_ranks(compare, ranks, family, implementation, what):
        assert less < kept


def test_a_ratio_lies_between_keeping_all_and_recomputing_all():
    half = run_ranks(compare, 1, "llama", "sdpa", "0.5")[0]
    full = run_ranks(compare, 1, "llama", "sdpa", "full")[0]
    assert full[1] < half[1] < half[0] == full[0]


@pytest.mark.parametrize("what", ["some", 0, 1.5, -1])
def test_a_wrong_value_is_refused(what):
    with pytest.raises(MeshError, match="'full', 'selective', or the ratio of layers"):
        ParallelConfig(recompute=what)


def test_what_can_not_be_told_apart_is_refused_by_name():
    tiny = dict(vocab_size=60, hidden_size=24, num_hidden_layers=2, context_length=16)
    model = AutoModelForCausalLM.from_config(RwkvConfig(**tiny))
    with pytest.raises(PlanError, match="RwkvForCausalLM does not go through the attention interface"):
        patch_model(model, ParallelConfig(recompute="selective"))
    model = tiny_class("llama", "causal")
    model.gradient_checkpointing_enable()
    with pytest.raises(PlanError, match="recomputes its layers already"):
        patch_model(model, ParallelConfig(recompute="full"))
