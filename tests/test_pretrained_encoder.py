"""Real pretrained weights of a BERT: all-MiniLM-L6-v2, whose 12 heads and 30,522 tokens several cores share."""

import shutil

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from examples.finetune_text_classification import minilm_directory
from optimum_trn.modeling import NeuronModel
from optimum_trn.parallel import ParallelConfig
from tests.distributed import run_ranks

TEXTS = [
    "Tensor parallelism cuts every weight matrix of a layer over several cores.",
    "Several cores hold a part of each weight matrix, which is called tensor parallelism.",
    "The cat sat on the mat.",
]


@pytest.fixture(scope="module")
def minilm():
    try:
        return minilm_directory()
    except FileNotFoundError as error:
        pytest.skip(f"no real weights: {error}")


@torch.no_grad()
def embeddings(model, directory):
    """One vector of length 1 for each text, as the sentence encoder makes it: the mean over its tokens."""
    batch = AutoTokenizer.from_pretrained(directory)(TEXTS, padding=True, return_tensors="pt").to(model.device)
    states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).cpu()


def on_ranks(rank, world_size, directory, saved):
    model = NeuronModel.from_pretrained(directory, ParallelConfig(world_size))
    result = embeddings(model, directory)
    if saved is not None:
        model.save_pretrained(saved)
    return result


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_cores_embed_texts_as_one_process_does_and_save_the_same_weights(cores, minilm, tmp_path):
    stock = AutoModel.from_pretrained(minilm)
    expected = embeddings(stock, minilm)
    assert expected[0] @ expected[1] > 0.7 > 0.3 > expected[0] @ expected[2]
    saved = tmp_path / "saved" if cores == 3 else None
    for actual in run_ranks(on_ranks, cores, str(minilm), saved and str(saved)):
        assert (actual - expected).abs().max() < 1e-5
    if saved is not None:
        again = AutoModel.from_pretrained(saved)
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
        shutil.rmtree(saved)
