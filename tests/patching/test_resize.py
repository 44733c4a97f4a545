"""The vocabulary of a patched model can be resized as that of the stock model can."""

import copy

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.parity import relative
from tests.models.proof import main_kind
from tests.models.tiny import KeepFloat64, batch, tiny_model


def resized(rank, world_size, tie):
    stock = tiny_model("llama", torch.float32, tie_word_embeddings=tie)
    patched = copy.deepcopy(stock)
    patch_model(patched, ParallelConfig(world_size))
    untouched = copy.deepcopy(patched)
    rows = batch(stock)
    for arguments in (dict(new_num_tokens=111), dict(new_num_tokens=107), dict(pad_to_multiple_of=16)):
        torch.manual_seed(7)
        expected = stock.resize_token_embeddings(**arguments)
        torch.manual_seed(7 + rank)  # what is drawn is what the first rank draws
        assert patched.resize_token_embeddings(**arguments) is patched.get_input_embeddings()
        state = state_of(patched)
        assert patched.config.vocab_size == expected.weight.shape[0]
        assert (patched.lm_head.weight is patched.model.embed_tokens.weight) == tie
        for name, tensor in stock.named_parameters():
            whole = unshard_from_group(patched.get_parameter(name), state.placements[name], state.tp_group)
            assert torch.equal(whole, tensor), name
        assert state.report.total_parameters == sum(parameter.numel() for parameter in stock.parameters())
        loss = stock(**rows).loss
        torch.testing.assert_close(patched.train()(**rows).loss, loss)
        torch.testing.assert_close(patched.eval()(**rows).logits, stock(**rows).logits, rtol=1e-4, atol=1e-5)
    assert patched.resize_token_embeddings() is patched.get_input_embeddings()
    patched.train()(**rows).loss.backward()
    assert state_of(untouched).placements["lm_head.weight"].global_shape == (104, 40)
    unpatch_model(patched)
    assert all(torch.equal(a, b) for a, b in zip(patched.parameters(), stock.parameters(), strict=True))
    assert "resize_token_embeddings" not in patched.__dict__


@pytest.mark.parametrize("tie", [False, True])
def test_resizing_gives_the_embeddings_of_the_stock_model_on_any_number_of_ranks(tie):
    run_ranks(resized, 2, tie, device="cpu")


def step(model, inputs):
    """The loss of one step; the graph must be gone before the vocabulary is resized again."""
    model.zero_grad()
    loss = model.train()(**inputs).loss
    loss.backward()
    return loss.detach()


def same_after_resizing(rank, world_size, model_types):
    for model_type in model_types:
        stock = tiny_class(model_type, main_kind(model_type))
        inputs = class_batch(stock, main_kind(model_type))
        patched = copy.deepcopy(stock)
        patch_model(patched, ParallelConfig(world_size))
        for arguments in (dict(new_num_tokens=111), dict(new_num_tokens=107), dict(pad_to_multiple_of=16)):
            for model in (stock, patched):
                torch.manual_seed(7)
                model.resize_token_embeddings(**arguments, mean_resizing="pad_to_multiple_of" not in arguments)
            state = state_of(patched)
            assert patched.get_input_embeddings().padding_idx == stock.get_input_embeddings().padding_idx
            with KeepFloat64():
                assert relative(step(patched, inputs), step(stock, inputs)) < 1e-9, model_type
            for name, tensor in stock.named_parameters(remove_duplicate=False):
                parameter, placement = patched.get_parameter(name), state.placements[name]
                assert torch.equal(unshard_from_group(parameter, placement, state.tp_group), tensor), name
                if tensor.grad is not None:
                    whole = unshard_from_group(parameter.grad, placement, state.tp_group)
                    assert relative(whole, tensor.grad) < 1e-9, (model_type, name)
        unpatch_model(patched)
        for name, module in stock.named_modules():
            assert type(patched.get_submodule(name)) is type(module), name
        patch_model(patched, ParallelConfig(world_size))  # a stock model that was resized before it is patched
        with KeepFloat64():
            assert relative(step(patched, inputs), step(stock, inputs)) < 1e-9, model_type


@pytest.mark.parametrize(
    "model_types",
    [
        pytest.param(["t5", "bart", "bert", "gpt2"], id="shared"),
        pytest.param(
            ["mt5", "mbart", "whisper", "opt", "albert", "electra", "deberta-v2", "bloom", "gptj", "gemma3_text"],
            id="more",
            marks=pytest.mark.full,
        ),
    ],
)
def test_tied_heads_and_embeddings_that_stacks_share_are_resized_as_in_the_stock_model(model_types):
    """One embedding under several names, with and without padding_idx, with a head's bias, and old gradients."""
    run_ranks(same_after_resizing, 2, model_types, device="cpu", environment=FLOAT64)
