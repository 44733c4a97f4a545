"""Checkpoints resumed at other layouts: the losses go on as if the run had not been interrupted."""

import pytest

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
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


def trainer(directory, world_size, **options):
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
    return NeuronTrainer(model=scenario.llama(), args=arguments, train_dataset=scenario.rows(24))


def losses(run):
    return [
        (log["loss"], log["grad_norm"], log["learning_rate"]) for log in run.state.log_history if "grad_norm" in log
    ]


def saved(rank, world_size, directory, options):
    run = trainer(directory, world_size, **options)
    run.train()
    return losses(run)


def resumed(rank, world_size, directory, checkpoint, options):
    run = trainer(directory, world_size, save_strategy="no", **options)
    run.train(resume_from_checkpoint=checkpoint)
    return losses(run)


def relayout(tmp_path, before, after, **more):
    """The log of the whole run at one layout, and of the run that another one continued."""
    world_size, options = LAYOUTS[before]
    whole = run_ranks(saved, world_size, str(tmp_path / "whole"), {**options, **more})[0]
    world_size, options = LAYOUTS[after]
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{SAVED}")
    return whole, run_ranks(resumed, world_size, str(tmp_path / "continued"), checkpoint, options)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *SAMPLE,
        *(
            pytest.param(before, after, marks=pytest.mark.full)
            for before in LAYOUTS
            for after in LAYOUTS
            if (before, after) not in SAMPLE
        ),
    ],
)
def test_losses_gradient_norms_and_learning_rates_go_on_at_another_layout(tmp_path, before, after):
    whole, ranks = relayout(tmp_path, before, after)
    assert len(whole) == STEPS
    for log in ranks:
        assert log[:SAVED] == whole[:SAVED]  # it comes with the checkpoint
        for now, then in zip(log[SAVED:], whole[SAVED:], strict=True):
            assert now == pytest.approx(then, rel=1e-5)
