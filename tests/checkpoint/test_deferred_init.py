"""Deferred initialisation gives the values of the stock class, bit for bit, without holding the model."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, initialization

from optimum_trn.checkpoint.deferred_init import DeferredInit, EmptyOnMeta
from optimum_trn.errors import UnsupportedModelError
from tests.models.tiny import SIZES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "bert", "opt", "modernbert"])
def test_any_class_draws_the_same_weights_and_leaves_the_generator_in_the_same_state(model_type, dtype):
    config = AutoConfig.for_model(model_type, **SIZES, dtype=dtype)
    config.is_decoder = True
    auto_class = AutoModelForMaskedLM if model_type == "modernbert" else AutoModelForCausalLM
    torch.manual_seed(3)
    expected = auto_class.from_config(copy.deepcopy(config))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with DeferredInit() as init, EmptyOnMeta():
        model = auto_class.from_config(copy.deepcopy(config))
    assert torch.equal(torch.get_rng_state(), state)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert matrices and all(parameter.is_meta for parameter in matrices)
    for (name, tensor), deferred in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(init.draw(deferred), tensor), name
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_can_be_drawn_in_any_order_and_more_than_once():
    torch.manual_seed(0)
    first, second = torch.empty(4, 3).normal_(), torch.empty(3, 4).uniform_(-1, 1)
    torch.manual_seed(0)
    with DeferredInit() as init:
        deferred = torch.empty(4, 3, device="meta").normal_(), torch.empty(3, 4, device="meta").uniform_(-1, 1)
    assert torch.equal(init.draw(deferred[1]), second)
    assert torch.equal(init.draw(deferred[0]), first)
    assert torch.equal(init.draw(deferred[1]), second)


def test_writes_to_a_part_of_a_weight_are_replayed_in_order():
    def initialise(tensor):
        torch.nn.init.kaiming_uniform_(tensor)
        tensor[2].zero_()
        tensor.mul_(3)
        torch.nn.init.normal_(tensor[:, 4])
        return tensor

    torch.manual_seed(0)
    expected = initialise(torch.empty(4, 30))
    torch.manual_seed(0)
    with DeferredInit() as init:
        deferred = initialise(torch.empty(4, 30, device="meta"))
    assert torch.equal(init.draw(deferred), expected)


@pytest.mark.parametrize("name", ["trunc_normal_", "orthogonal_", "lecun_normal_", "xavier_normal_"])
def test_initialisers_that_look_at_what_they_drew_are_replayed_as_one(name):
    initialise = getattr(initialization, name)
    table = dict(initialization.TORCH_INIT_FUNCTIONS)
    torch.manual_seed(0)
    expected = torch.empty(6, 4)
    initialise(expected)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with DeferredInit() as init:
        deferred = torch.empty(6, 4, device="meta").fill_(7)
        initialise(deferred)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(init.draw(deferred), expected)
    assert initialization.TORCH_INIT_FUNCTIONS == table


def test_an_initialiser_that_reads_weights_is_refused_not_guessed():
    with pytest.raises(UnsupportedModelError, match="computes one weight from another"), DeferredInit():
        weight = torch.empty(4, 4, device="meta").normal_()
        weight.copy_(weight / weight.norm())


@pytest.mark.parametrize(
    "initialise", [lambda tensor: None, torch.nn.init.trunc_normal_, lambda tensor: tensor[0].zero_()]
)
def test_a_weight_that_no_initialiser_wrote_whole_is_refused_with_its_shape(initialise):
    # torch 2.13: called past transformers, trunc_normal_ returns at once for meta tensors and leaves them as they are.
    weight = torch.empty(4, 3, device="meta")
    with DeferredInit() as init:
        initialise(weight)
    with pytest.raises(UnsupportedModelError, match=r"\(4, 3\)"):
        init.draw(weight)
