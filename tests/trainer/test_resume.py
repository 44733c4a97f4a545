"""Checkpoints: a run that was interrupted continues as if it had not been, or is refused."""

import logging
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from optimum_trn.errors import CheckpointError
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.models.families import tiny_class
from tests.trainer import scenario

STEPS = 6


def trainer(directory, tensor_parallel_size=1, **options):
    arguments = NeuronTrainingArguments(
        **{
            "output_dir": str(directory),
            "tensor_parallel_size": tensor_parallel_size,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": 2,
            "disable_tqdm": True,
            "report_to": [],
            **options,
        }
    )
    return NeuronTrainer(
        model=model_of(arguments),
        args=arguments,
        train_dataset=scenario.rows(21),
        eval_dataset=scenario.rows(5, seed=1),
    )


def model_of(arguments):
    """A model with dropout, so that a lost generator state shows, and with experts if they are to be shared out."""
    if arguments.expert_parallel_size == 1:
        return scenario.llama(attention_dropout=0.2)
    model = tiny_class("mixtral", "causal", torch.float32, vocab_size=scenario.VOCABULARY)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model


def losses(run):
    return [log["loss"] for log in run.state.log_history if "grad_norm" in log]


def interrupted(rank, world_size, directory, options):
    whole = trainer(Path(directory, "whole"), **options)
    whole.train()
    resumed = trainer(Path(directory, "whole"), **options)
    resumed.train(resume_from_checkpoint=str(Path(directory, "whole", "checkpoint-4")))
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    return losses(whole), losses(resumed), all(torch.equal(local_part(a), local_part(b)) for a, b in pairs)


def local_part(parameter):
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach().cpu()


@pytest.mark.parametrize(
    ("world_size", "options", "device"),
    [
        (2, dict(tensor_parallel_size=2), "neuron"),
        pytest.param(2, dict(tensor_parallel_size=2), "cpu", marks=pytest.mark.full),
        (2, dict(tensor_parallel_size=1), "neuron"),
        pytest.param(2, dict(tensor_parallel_size=1), "cpu", marks=pytest.mark.full),
        (4, dict(tensor_parallel_size=2), "neuron"),
        pytest.param(4, dict(tensor_parallel_size=2), "cpu", marks=pytest.mark.full),
        pytest.param(2, dict(tensor_parallel_size=1, mics_partition_size=2), "cpu", marks=pytest.mark.full),
        (4, dict(tensor_parallel_size=2, mics_partition_size=2), "neuron"),
        (2, dict(context_parallel_size=2), "neuron"),
        (2, dict(expert_parallel_size=2), "neuron"),
        pytest.param(4, dict(context_parallel_size=2), "cpu", marks=pytest.mark.full),
        pytest.param(4, dict(context_parallel_size=2, tensor_parallel_size=2), "neuron", marks=pytest.mark.full),
        pytest.param(4, dict(context_parallel_size=2, mics_partition_size=2), "cpu", marks=pytest.mark.full),
        pytest.param(4, dict(expert_parallel_size=2), "cpu", marks=pytest.mark.full),
        pytest.param(4, dict(expert_parallel_size=2, pipeline_parallel_size=2), "neuron", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_losses_and_weights_to_the_bit(tmp_path, device, world_size, options):
    for whole, resumed, same in run_ranks(
        interrupted, world_size, str(tmp_path), options, device=device, timeout=90 * world_size
    ):
        assert len(whole) == STEPS
        assert resumed == whole  # the log of the first four steps comes with the checkpoint
        assert same


def damaged(rank, world_size, directory):
    """What becomes of checkpoints of 2 tensor-parallel ranks that are not what was written."""
    trainer(directory, 2, max_steps=4, save_steps=1).train()
    torch.distributed.barrier()
    newest = Path(directory, "checkpoint-4")
    if rank == 0:
        flip(newest / "optimizer.safetensors")
        flip(Path(directory, "checkpoint-3", "model.safetensors"))
        os.truncate(Path(directory, "checkpoint-2", "optimizer.safetensors"), 1000)
    before = sorted(path.name for path in Path(directory).iterdir())
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        trainer(directory, 2).train(resume_from_checkpoint=str(newest))
    resumed = trainer(directory, 2, max_steps=4, save_strategy="no")
    with in_log("optimum_trn") as lines:
        resumed.train(resume_from_checkpoint=True)
    assert [log["step"] for log in resumed.state.log_history if "grad_norm" in log] == [1, 2, 3, 4]
    torch.distributed.barrier()
    if rank == 0:
        Path(directory, "checkpoint-1", f"rng_state_{world_size - 1}.pth").unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as none_left:
        trainer(directory, 2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in Path(directory).iterdir()) == before
    return str(caught.value), lines, str(none_left.value)


def flip(file):
    """One bit in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextmanager
def in_log(name):
    """What a logger says meanwhile."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


def test_damaged_checkpoints_are_refused_or_skipped_with_the_reason_and_nothing_is_deleted(tmp_path):
    for refused, log, none_left in run_ranks(damaged, 2, str(tmp_path)):
        assert "checkpoint-4/optimizer.safetensors is damaged between bytes" in refused
        skipped = [line for line in log if "Skipping" in line]
        assert len(skipped) == 3
        assert "checkpoint-4/optimizer.safetensors is damaged" in skipped[0]
        assert "checkpoint-3/model.safetensors is damaged" in skipped[1]
        assert "checkpoint-2/optimizer.safetensors has 1,000 bytes where" in skipped[2]
        assert "checkpoint-1/rng_state_1.pth is missing" in none_left


def best(rank, world_size, directory, tensor_parallel_size):
    run = trainer(
        directory,
        tensor_parallel_size,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the first evaluation is the best
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    run.train()
    evaluated = [log["eval_loss"] for log in run.state.log_history if "eval_loss" in log]
    return evaluated, run.evaluate()["eval_loss"], run.state.best_model_checkpoint


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    for evaluated, final, checkpoint in run_ranks(best, 2, str(tmp_path), 2):
        assert evaluated[0] > evaluated[-1]
        assert final == pytest.approx(evaluated[0], rel=1e-6)
        assert Path(checkpoint).name == "checkpoint-2"
