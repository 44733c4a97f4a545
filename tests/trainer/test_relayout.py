"""Checkpoints resumed at other layouts: the losses go on as if the run had not been interrupted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.trainer import scenario

STEPS, SAVED, ROWS = 5, 3, 4
LAYOUTS = {
    "1": (1, dict()),
    "TP2": (2, dict(tensor_parallel_size=2)),
    "TP4": (4, dict(tensor_parallel_size=4)),
    "TP2xDP2": (4, dict(tensor_parallel_size=2)),
    "PP2": (2, dict(pipeline_parallel_size=2)),
    "TP2xPP2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
    "ZeRO-1 DP2": (2, dict()),
    "MiCS 2": (2, dict(mics_partition_size=2)),
}
SAMPLE = [("1", "TP2"), ("TP2", "ZeRO-1 DP2"), ("ZeRO-1 DP2", "PP2"), ("PP2", "MiCS 2"), ("MiCS 2", "1")]


def trainer(directory, world_size, dtype=torch.float64, **options):
    local_device()  # lets a simulated core take float64
    copies = world_size // options.get("tensor_parallel_size", 1) // options.get("pipeline_parallel_size", 1)
    arguments = NeuronTrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": STEPS,
            "per_device_train_batch_size": ROWS // copies,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_steps": SAVED,
            "disable_tqdm": True,
            "report_to": [],
            **options,
        }
    )
    return NeuronTrainer(model=scenario.llama().to(dtype), args=arguments, train_dataset=scenario.rows(24))


def losses(run):
    return [
        (log["loss"], log["grad_norm"], log["learning_rate"]) for log in run.state.log_history if "grad_norm" in log
    ]


def saved(rank, world_size, directory, dtype, options):
    run = trainer(directory, world_size, dtype, **options)
    run.train()
    return losses(run)


def resumed(rank, world_size, directory, checkpoint, options):
    run = trainer(directory, world_size, save_strategy="no", **options)
    run.train(resume_from_checkpoint=checkpoint)
    return losses(run)


class SavesAndStops(TrainerCallback):
    """Saves again what was read, before anything is trained."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._save_checkpoint(self.trainer.model, None)
        self.trainer.finish_saving()
        raise InterruptedError


def saved_again(rank, world_size, directory, checkpoint, options):
    run = trainer(directory, world_size, torch.bfloat16, **options)
    stop = SavesAndStops()
    stop.trainer = run
    run.add_callback(stop)
    with pytest.raises(InterruptedError):
        run.train(resume_from_checkpoint=checkpoint)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By layout and type, the log of a run that was not interrupted, and a checkpoint of its middle: made once."""
    runs = {}

    def run(layout, dtype=torch.float64):
        if (layout, dtype) not in runs:
            world_size, options = LAYOUTS[layout]
            directory = tmp_path_factory.mktemp("whole")
            log = run_ranks(saved, world_size, str(directory), dtype, options, environment=FLOAT64)[0]
            runs[layout, dtype] = log, directory / f"checkpoint-{SAVED}"
        return runs[layout, dtype]

    return run


def every(sample):
    """All pairs of layouts, of which the default run takes a few."""
    return [
        pytest.param(before, after, marks=() if (before, after) in sample else pytest.mark.full)
        for before in LAYOUTS
        for after in LAYOUTS
    ]


@pytest.mark.parametrize(("before", "after"), every(SAMPLE))
def test_losses_gradient_norms_and_learning_rates_go_on_at_another_layout(tmp_path, whole, before, after):
    log, checkpoint = whole(before)
    world_size, options = LAYOUTS[after]
    assert len(log) == STEPS
    for found in run_ranks(resumed, world_size, str(tmp_path), str(checkpoint), options, environment=FLOAT64):
        assert found[:SAVED] == log[:SAVED]  # it comes with the checkpoint
        for now, then in zip(found[SAVED:], log[SAVED:], strict=True):
            assert now == pytest.approx(then, rel=1e-6)


def content(checkpoint):
    """The weights and the states of the optimizer, master weights among them, by name."""
    return {
        f"{path.name}/{name}": tensor
        for path in Path(checkpoint).glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize(("before", "after"), every([("ZeRO-1 DP2", "MiCS 2")]))
def test_bfloat16_weights_and_their_float32_masters_come_to_another_layout_to_the_bit(tmp_path, whole, before, after):
    _, checkpoint = whole(before, torch.bfloat16)
    world_size, options = LAYOUTS[after]
    run_ranks(saved_again, world_size, str(tmp_path), str(checkpoint), options)
    expected, found = content(checkpoint), content(tmp_path / f"checkpoint-{SAVED}")
    assert {tensor.dtype for tensor in expected.values()} >= {torch.bfloat16, torch.float32}
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
