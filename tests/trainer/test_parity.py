"""What a user sees of a run on any mesh is what the stock Trainer shows in one process."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer import scenario

MESHES = {"tp2": (2, 2), "dp2": (2, 1), "tp2 x dp2": (4, 2)}
DEVICES = ["neuron", "cpu"]


def sharded(rank, world_size, directory, tensor_parallel_size, options):
    torch.manual_seed(rank)  # nobody promised equal generators
    return scenario.run(
        NeuronTrainer, NeuronTrainingArguments, directory, tensor_parallel_size=tensor_parallel_size, **options
    )


def compare(tmp_path, mesh, device, *, own=None, **options):
    """Run on a mesh with 2 rows a data-parallel rank, and in one process with as many rows in all."""
    world_size, tensor_parallel_size = MESHES[mesh]
    replicas = world_size // tensor_parallel_size
    stock = scenario.run(
        Trainer,
        TrainingArguments,
        str(tmp_path / "stock"),
        use_cpu=True,
        per_device_train_batch_size=2 * replicas,
        per_device_eval_batch_size=2 * replicas,
        **options,
    )
    options = {**options, **(own or {})}
    options.pop("wrap_rows", None)
    ranks = run_ranks(
        sharded, world_size, str(tmp_path / "ours"), tensor_parallel_size, options, device=device, timeout=180
    )
    for result in ranks:
        assert_same(result, stock)
    assert_same_weights(tmp_path / "ours" / "result", tmp_path / "stock" / "result")


def assert_same(result, stock):
    assert result["steps"] == stock["steps"]
    np.testing.assert_allclose(result["losses"], stock["losses"], rtol=2e-5)
    np.testing.assert_allclose(result["grad_norms"], stock["grad_norms"], rtol=1e-4)
    assert result["tokens"] == stock["tokens"]
    assert result["flops"] == stock["flops"]
    for name in ("before", "after", "predicted"):
        assert result[name] == pytest.approx(stock[name], rel=2e-5), name
    np.testing.assert_array_equal(result["label_ids"], stock["label_ids"])
    np.testing.assert_array_equal(result["predictions"], stock["predictions"])


def assert_same_weights(ours, stock):
    loaded, expected = (LlamaForCausalLM.from_pretrained(path).state_dict() for path in (ours, stock))
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        off = (loaded[name] - weight).abs() > 1e-5 + 1e-5 * weight.abs()
        assert off.float().mean() < 1e-3, f"{name}: {int(off.sum())} of {off.numel()} entries differ"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mesh", MESHES)
def test_two_epochs_with_a_partial_last_batch_accumulation_and_clipping(tmp_path, mesh, device):
    # Data-parallel ranks fill the last batch up with the first rows, as in the stock Trainer.
    wrap_rows = 0 if mesh == "tp2" else 3
    compare(tmp_path, mesh, device, wrap_rows=wrap_rows, train_sampling_strategy="sequential")
