"""NeuronTrainer over a pipeline: the run that a user sees is that of the stock Trainer in one process."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.distributed import run_ranks
from tests.trainer import scenario
from tests.trainer.test_parity import assert_same, assert_same_weights, sharded, sum_of_losses
from tests.trainer.test_resume import STEPS, losses, trainer

PP2 = dict(pipeline_parallel_size=2)
CASES = {
    "pp2": (2, 1, PP2, {}),
    "pp2 x dp2 with zero-1": (4, 1, PP2, dict(wrap_rows=3)),
}
FULL_CASES = {
    "tp2 x pp2": (4, 2, PP2, {}),
    "pp2 interleaved, tied": (
        2,
        1,
        {**PP2, "pipeline_schedule": "interleaved_1f1b"},
        dict(config={"tie_word_embeddings": True, "num_hidden_layers": 4}),
    ),
    "pp2 zero bubble x dp2, tied": (
        4,
        1,
        {**PP2, "pipeline_schedule": "zero_bubble"},
        dict(config={"tie_word_embeddings": True}, wrap_rows=3),
    ),
    "pp2 x dp2 without zero-1": (4, 1, {**PP2, "zero_1": False}, dict(wrap_rows=3)),
    "pp2 recomputed": (2, 1, PP2, dict(gradient_checkpointing=True)),
    "a loss function of the user's": (2, 1, PP2, dict(trainer_options={"compute_loss_func": sum_of_losses})),
    "label smoothing": (2, 1, PP2, dict(label_smoothing_factor=0.1)),
    "gathered as objects": (4, 1, {**PP2, "eval_use_gather_object": True}, dict(wrap_rows=3)),
    "streamed": (4, 1, PP2, dict(iterable=True, max_steps=5, wrap_rows=1)),
    "tp2 x pp2 x dp2": (8, 2, PP2, dict(wrap_rows=3)),
}


def compare(tmp_path, name, device="neuron"):
    world_size, tensor_parallel_size, own, options = {**CASES, **FULL_CASES}[name]
    # Three micro-batches a step, and two or fewer in the last of each epoch.
    options = {"gradient_accumulation_steps": 3, "train_sampling_strategy": "sequential", **options}
    replicas = world_size // tensor_parallel_size // 2
    stock = scenario.run(
        Trainer,
        TrainingArguments,
        str(tmp_path / "stock"),
        use_cpu=True,
        per_device_train_batch_size=2 * replicas,
        per_device_eval_batch_size=2 * replicas,
        **options,
    )
    options.pop("wrap_rows", None)
    timeout = 180
    if world_size > 4:  # more than the simulated chip has cores
        device, timeout = "cpu", 400
    ours = str(tmp_path / "ours")
    ranks = run_ranks(
        sharded, world_size, ours, tensor_parallel_size, {**options, **own}, device=device, timeout=timeout
    )
    for result in ranks:
        assert_same(result, stock)
    assert_same_weights(tmp_path / "ours" / "result", tmp_path / "stock" / "result")


@pytest.mark.parametrize("name", CASES)
def test_training_evaluation_prediction_and_files(tmp_path, name):
    compare(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL_CASES)
def test_more_combinations_and_options(tmp_path, name):
    compare(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(tmp_path, name):
    compare(tmp_path, name, device="cpu")


def interrupted(rank, world_size, directory, options):
    whole = trainer(Path(directory, "whole"), 1, **options)
    whole.train()
    resumed = trainer(Path(directory, "whole"), 1, **options)
    resumed.train(resume_from_checkpoint=str(Path(directory, "whole", f"checkpoint-{STEPS - 2}")))
    weights = [parameter.detach().cpu() for parameter in whole.model.parameters()]
    same = all(torch.equal(a, b.detach().cpu()) for a, b in zip(weights, resumed.model.parameters(), strict=True))
    return losses(whole), losses(resumed), same


def test_a_resumed_run_has_the_same_losses_and_weights_to_the_bit(tmp_path):
    for whole, resumed, same in run_ranks(interrupted, 2, str(tmp_path), PP2):
        assert len(whole) == STEPS
        assert resumed == whole
        assert same
