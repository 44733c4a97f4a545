"""Techniques together: every step's loss and gradient norm, and the weights after, are those of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from optimum_trn.parallel import ParallelConfig
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.tiny import KeepFloat64
from tests.trainer import scenario

STEPS = 3

COMBINATIONS = {
    "TP2 x DP2": (4, dict(tensor_parallel_size=2, zero_1=False)),
    "TP2 x SP x ZeRO-1 x DP2": (4, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "MiCS 2x2": (4, dict(mics_partition_size=2)),
    "MiCS x TP (2x1x2)": (4, dict(tensor_parallel_size=2, mics_partition_size=2)),
    "MiCS x CP (2x2)": (4, dict(context_parallel_size=2, mics_partition_size=2)),
    "MiCS x CP x DP (2x2x2)": (8, dict(context_parallel_size=2, mics_partition_size=2)),
}


def trained(trainer_class, arguments_class, directory, dtype=torch.float64, **options):
    """Accumulation over 2 micro-batches with unequal numbers of labels, and active clipping."""
    arguments = arguments_class(
        **{
            "output_dir": directory,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **options,
        }
    )
    trainer = trainer_class(model=scenario.llama().to(dtype), args=arguments, train_dataset=scenario.rows(24))
    with KeepFloat64():
        trainer.train()
    trainer.save_model(str(Path(directory, "result")))
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log["loss"] for log in logs], [log["grad_norm"] for log in logs]


def on_ranks(rank, world_size, directory, options):
    local_device()  # which lets the simulator compute in float64
    return trained(NeuronTrainer, NeuronTrainingArguments, directory, **options)


def one_process(directory, rows, **options):
    options = {"use_cpu": True, "per_device_train_batch_size": rows, **options}
    return trained(Trainer, TrainingArguments, str(directory), **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """By the rows of a micro-batch: losses, norms and weights of one process."""
    found = {}
    for rows in (2, 4):
        directory = tmp_path_factory.mktemp("stock")
        found[rows] = (*one_process(directory, rows), load_file(directory / "result" / "model.safetensors"))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if "x CP" in name else []) for name in COMBINATIONS]
)
def test_a_combination_trains_as_one_process_does(tmp_path, expected, name):
    world_size, options = COMBINATIONS[name]
    copies = world_size // ParallelConfig(**options).ranks_per_copy
    rows = 2 if copies <= 2 else 1  # so that one process has as many in all
    losses, norms, weights = expected[copies * rows]
    assert min(norms) > 0.5, "clipping is not active"
    ranks = run_ranks(
        on_ranks,
        world_size,
        str(tmp_path),
        {**options, "per_device_train_batch_size": rows},
        device="neuron" if world_size <= 4 else "cpu",  # a chip has 4 cores
        environment=FLOAT64,
        timeout=60 * world_size,
    )
    for found_losses, found_norms in ranks:
        np.testing.assert_allclose(found_losses, losses, rtol=1e-6)  # which Trainer adds up in float32
        np.testing.assert_allclose(found_norms, norms, rtol=1e-9)
    found = load_file(tmp_path / "result" / "model.safetensors")
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        assert found[key].dtype == torch.float64
        torch.testing.assert_close(found[key], weight, rtol=1e-8, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


BFLOAT16 = {
    "ZeRO-1 with master weights": (dict(tensor_parallel_size=2, sequence_parallel=True), torch.bfloat16),
    "MiCS with master weights": (dict(tensor_parallel_size=2, mics_partition_size=2), torch.bfloat16),
    "autocast": (dict(tensor_parallel_size=2, bf16=True), torch.float32),
}


def in_bfloat16(rank, world_size, directory, options, dtype):
    return trained(NeuronTrainer, NeuronTrainingArguments, directory, dtype=dtype, **options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "ZeRO-1" in name else pytest.mark.full) for name in BFLOAT16]
)
def test_losses_in_bfloat16_are_within_two_percent_of_one_process(tmp_path, name):
    options, dtype = BFLOAT16[name]
    precision = {key: value for key, value in options.items() if key == "bf16"}
    losses, norms = one_process(tmp_path / "stock", 4, dtype=dtype, **precision)
    for found_losses, found_norms in run_ranks(in_bfloat16, 4, str(tmp_path / "ours"), options, dtype, timeout=180):
        np.testing.assert_allclose(found_losses, losses, rtol=0.02)
        np.testing.assert_allclose(found_norms, norms, rtol=0.05)
    expected, found = (load_file(tmp_path / which / "result" / "model.safetensors") for which in ("stock", "ours"))
    assert {key: tensor.dtype for key, tensor in found.items()} == dict.fromkeys(expected, dtype)
