"""What a user sees of a run on any mesh is what the stock Trainer shows in one process."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import DEVICES, NEURON_FIRST
from tests.distributed import run_ranks
from tests.trainer import scenario

MESHES = {"tp2": (2, 2), "dp2": (2, 1), "tp2 x dp2": (4, 2)}


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


def sum_of_losses(outputs, labels, num_items_in_batch=None):
    """A loss function of the user's own: it needs whole logits."""
    logits = outputs.logits[..., :-1, :].float().flatten(0, 1)
    loss = F.cross_entropy(logits, labels[..., 1:].flatten(), reduction="sum", label_smoothing=0.2)
    return loss / num_items_in_batch


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


OPTIONS = {
    "label smoothing": dict(label_smoothing_factor=0.1),
    "a loss function": dict(trainer_options={"compute_loss_func": sum_of_losses}),
    "shuffled": dict(train_sampling_strategy="random", train_rows=24, wrap_rows=0),
    "batches balanced by length": dict(train_sampling_strategy="batch_rebalance", train_rows=24, wrap_rows=0),
    "activation checkpointing": dict(activation_checkpointing=True),
    "tied weights and no clipping": dict(config={"tie_word_embeddings": True}, max_grad_norm=0.0),
    "the whole optimizer on every rank": dict(own=dict(zero_1=False)),
    "weights sharded over data-parallel ranks": dict(own=dict(mics_partition_size=2)),
    "results to the CPU after each batch": dict(eval_accumulation_steps=1),
    "results gathered as objects": dict(own=dict(eval_use_gather_object=True)),
    "iterable, dispatched by rank 0": dict(iterable=True, max_steps=5, wrap_rows=1),
    "iterable, read by all ranks": dict(
        iterable=True, max_steps=5, wrap_rows=1, own=dict(accelerator_config={"dispatch_batches": False})
    ),
    "shuffled and dispatched by rank 0": dict(
        train_sampling_strategy="random",
        train_rows=24,
        wrap_rows=0,
        own=dict(accelerator_config={"dispatch_batches": True}),
    ),
    # Evaluation of whole batches only: Trainer repeats a loss as often as the unsplit batch has rows.
    "batches split over the ranks": dict(
        train_rows=24,
        eval_rows=12,
        wrap_rows=0,
        own=dict(
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            accelerator_config={"split_batches": True},
        ),
    ),
}


FULL = {"the whole optimizer on every rank"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in FULL else []) for name in OPTIONS]
)
def test_options_on_tensor_and_data_parallel_ranks(tmp_path, name):
    compare(
        tmp_path,
        "tp2 x dp2",
        "neuron",
        **{"max_steps": 6, "wrap_rows": 3, "train_sampling_strategy": "sequential", **OPTIONS[name]},
    )


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_tokens_averaged_per_rank_are_those_of_stock_data_parallel_ranks(tmp_path, device):
    """average_tokens_across_devices=False: transformers' own tensor parallelism divides by the wrong number here."""
    # The stock Trainer forgets to wrap a model in DistributedDataParallel that it has evaluated before.
    options = dict(max_steps=6, average_tokens_across_devices=False, evaluate_first=False)
    stock = run_ranks(stock_replica, 2, str(tmp_path / "stock"), options, device="cpu")
    ours = run_ranks(sharded, 4, str(tmp_path / "ours"), 2, options, device=device)
    for result in ours:
        np.testing.assert_allclose(result["losses"], stock[0]["losses"], rtol=2e-5)
        np.testing.assert_allclose(result["grad_norms"], stock[0]["grad_norms"], rtol=1e-4)
    assert_same_weights(tmp_path / "ours" / "result", tmp_path / "stock" / "result")


def stock_replica(rank, world_size, directory, options):
    return scenario.run(Trainer, TrainingArguments, directory, use_cpu=True, **options)
