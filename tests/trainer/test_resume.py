"""Checkpoints: a run that was interrupted continues as if it had not been, or is refused."""

import json
from pathlib import Path

import pytest
import torch

from optimum_trn.errors import CheckpointError
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.trainer.training_state import is_complete, newest_complete_checkpoint
from tests.devices import DEVICES
from tests.distributed import run_ranks
from tests.trainer import scenario

STEPS = 6


def trainer(directory, tensor_parallel_size, **options):
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
        model=scenario.llama(attention_dropout=0.2),  # so that a lost generator state shows
        args=arguments,
        train_dataset=scenario.rows(21),
        eval_dataset=scenario.rows(5, seed=1),
    )


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
        *((2, dict(tensor_parallel_size=2), device) for device in DEVICES),
        (2, dict(tensor_parallel_size=1), "neuron"),
        pytest.param(2, dict(tensor_parallel_size=1), "cpu", marks=pytest.mark.full),
        *((4, dict(tensor_parallel_size=2), device) for device in DEVICES),
        pytest.param(2, dict(tensor_parallel_size=1, mics_partition_size=2), "cpu", marks=pytest.mark.full),
        (4, dict(tensor_parallel_size=2, mics_partition_size=2), "neuron"),
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_losses_and_weights_to_the_bit(tmp_path, device, world_size, options):
    for whole, resumed, same in run_ranks(interrupted, world_size, str(tmp_path), options, device=device):
        assert len(whole) == STEPS
        assert resumed == whole  # the log of the first four steps comes with the checkpoint
        assert same


def other_layouts(rank, world_size, directory):
    """What becomes of a checkpoint of 2 tensor-parallel ranks, and of ones that are not whole."""
    trainer(directory, 2, max_steps=2).train()
    torch.distributed.barrier()
    checkpoint = Path(directory, "checkpoint-2")
    texts = []
    with pytest.raises(CheckpointError) as caught:
        trainer(directory, 1).train(resume_from_checkpoint=True)
    texts.append(str(caught.value))

    torch.distributed.barrier()
    if rank == 0:
        (checkpoint / "optimizer_tp1of2.pt").rename(checkpoint / "gone")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        trainer(directory, 2).train(resume_from_checkpoint=str(checkpoint))
    texts.append(str(caught.value))

    torch.distributed.barrier()
    if rank == 0:
        (checkpoint / "trainer_state.json").write_text('{"epoch": ')
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        trainer(directory, 2).train(resume_from_checkpoint=str(checkpoint))
    texts.append(str(caught.value))
    return texts


def test_what_cannot_be_resumed_is_refused_on_every_rank(tmp_path):
    first, second = run_ranks(other_layouts, 2, str(tmp_path))
    assert first == second
    layout, missing, torn = first
    assert "saved at tensor_parallel_size=2 and can't be resumed at data_parallel_size=2 with zero_1" in layout
    assert "optimizer_tp1of2.pt is missing" in missing
    assert "Saving was interrupted" in torn


def test_the_newest_complete_checkpoint_is_taken(tmp_path):
    for step in (2, 10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        newest_complete_checkpoint(tmp_path)
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert not is_complete(tmp_path / "checkpoint-30")
    assert newest_complete_checkpoint(tmp_path).name == "checkpoint-10"


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
