"""The vocabulary of a patched model can be resized as that of the stock model can."""

import copy

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, state_of, unpatch_model
from tests.distributed import run_ranks
from tests.models.tiny import batch, tiny_model


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
