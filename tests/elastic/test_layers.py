"""Layers move with all that belongs to them: weights, buffers, ties and optimizer states."""

from copy import deepcopy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_trn.elastic.layers import Layers
from optimum_trn.errors import PlanError


def trained(seed, tied, steps=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    tokens = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(5))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("tied", [True, False])
def test_a_process_that_takes_over_all_layers_goes_on_as_their_source_would(tied):
    source_model, source_optimizer = trained(0, tied)
    model, optimizer = trained(1, tied)
    source, target = Layers(source_model, source_optimizer), Layers(model, optimizer)
    # First some, the others are dropped; then what is lacking, from another that has all.
    some = [path for path, layer in source.map.modules.items() if layer < 2]
    target.install({path: deepcopy(source.state_of(path)) for path in some}, some)
    assert set(target.names(some)) < set(source.trained)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sum(sizes) == len(target.names(some)) == len(optimizer.state)
    rest = [path for path in source.map.modules if path not in some]
    target.install({path: deepcopy(source.state_of(path)) for path in rest}, source.map.modules)
    assert [len(g["params"]) for g in optimizer.param_groups] == [
        len(g["params"]) for g in source_optimizer.param_groups
    ]
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    for _ in range(3):
        assert step(model, optimizer) == step(source_model, source_optimizer)
    for ours, theirs in zip(model.parameters(), source_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_layer_has_its_cost_and_the_head_that_of_its_products():
    layers = Layers(*trained(0, tied=True, steps=0))
    assert layers.costs[0] < layers.costs[2] and layers.costs[1] < layers.costs[0]  # an embedding is a look-up


def test_an_optimizer_of_other_tensors_is_refused():
    model, _ = trained(0, tied=True, steps=0)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    with pytest.raises(PlanError, match="trains other tensors than the parameters of the model"):
        Layers(model, torch.optim.AdamW(masters))
