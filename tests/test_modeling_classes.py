"""Every auto class loads tensor-parallel, from stock files or anew, and saves files that the stock class loads."""

import pytest
import torch

import optimum_trn
from optimum_trn import ParallelConfig
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.proof import tensors

CLASSES = [  # public name, model type, kind of class
    ("NeuronModel", "deepseek_v3", "base"),
    ("NeuronModelForCausalLM", "gpt2", "causal"),
    ("NeuronModelForMaskedLM", "bert", "masked"),
    ("NeuronModelForSeq2SeqLM", "t5", "seq2seq"),
    ("NeuronModelForSequenceClassification", "falcon", "sequence"),
    ("NeuronModelForTokenClassification", "mixtral", "token"),
    ("NeuronModelForQuestionAnswering", "modernbert", "question"),
    ("NeuronModelForImageClassification", "vit", "image"),
]


def saved_again(rank, world_size, name, model_type, kind, directory):
    """Loads on two ranks, compares all outputs with the stock model's, saves."""
    model = getattr(optimum_trn, name).from_pretrained(directory, ParallelConfig(world_size), dtype=torch.float32)
    expected = tiny_class(model_type, kind, torch.float32)
    assert type(model) is type(expected)
    assert sum(p.numel() for p in model.parameters()) < 0.75 * sum(p.numel() for p in expected.parameters())
    rows = class_batch(expected, kind)
    rows = {key: value for key, value in rows.items() if "label" not in key and "positions" not in key}
    with torch.no_grad():
        outputs, stock_outputs = tensors(model(**rows)), tensors(expected(**rows))
    for key, value in stock_outputs.items():
        torch.testing.assert_close(outputs[key], value, rtol=1e-4, atol=1e-4)
    model.save_pretrained(f"{directory}/again")


@pytest.mark.parametrize("name, model_type, kind", CLASSES)
def test_a_class_loads_stock_files_and_saves_them(tmp_path, name, model_type, kind):
    model = tiny_class(model_type, kind, torch.float32)
    # The files of released mixtures of experts hold every expert by itself, which a sharded load refuses by name.
    model.save_pretrained(tmp_path, save_original_format=False)
    run_ranks(saved_again, 2, name, model_type, kind, str(tmp_path), device="cpu")
    again = type(model).from_pretrained(tmp_path / "again")
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
