"""The other examples run without a network on two cores, learn, and save what stock transformers loads."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
)

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0")


def launch(directory: Path, launcher: tuple[str, ...], name: str, *options: str) -> dict:
    script = str(ROOT / "examples" / f"{name}.py")
    command = [sys.executable, *launcher, script, "--output_dir", str(directory), "--tensor_parallel_size", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "home"),
        "OPTIMUM_TRN_AUTOLOAD": "1",
    }
    result = subprocess.run(
        [*command, *options], env=environment, cwd=directory, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr[-5000:]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["losses"][-1] < summary["losses"][0], summary
    return summary


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options", "better", "auto_class"),
    [
        ("finetune_chat", ["--scratch_steps", "40"], ("eval_loss_after", "eval_loss_before"), AutoModelForCausalLM),
        (
            "finetune_chat",
            ["--scratch_steps", "2", "--packing", "--assistant_only_loss", "false"],
            ("eval_loss_after", "eval_loss_before"),
            AutoModelForCausalLM,
        ),
        ("finetune_dpo", ["--scratch_steps", "40"], ("eval_loss_after", "eval_loss_before"), AutoModelForCausalLM),
        (
            "finetune_token_classification",
            ["--num_train_epochs", "1"],
            ("accuracy_before", "accuracy_after"),
            AutoModelForTokenClassification,
        ),
        (
            "finetune_question_answering",
            ["--num_train_epochs", "1"],
            ("eval_loss_after", "eval_loss_before"),
            AutoModelForQuestionAnswering,
        ),
        (
            "finetune_summarization",
            ["--num_train_epochs", "1"],
            ("eval_loss_after", "eval_loss_before"),
            AutoModelForSeq2SeqLM,
        ),
        (
            "finetune_image_classification",
            ["--images", "500"],
            ("accuracy_before", "accuracy_after"),
            AutoModelForImageClassification,
        ),
        ("pretrain_clm", ["--max_steps", "20"], None, AutoModelForCausalLM),
    ],
)
def test_it_learns_on_two_cores_and_saves_stock_files(tmp_path, name, options, better, auto_class):
    summary = launch(tmp_path, TORCHRUN, name, *options)
    if better is not None:
        less, more = better
        assert summary[less] < summary[more], summary
    auto_class.from_pretrained(tmp_path)


@pytest.mark.full
def test_a_loop_of_ones_own_is_the_same_however_it_is_started(tmp_path):
    starts = {
        "torchrun": (TORCHRUN, ()),
        "accelerate": (ACCELERATE, ()),
        "notebook": ((), ("--notebook_processes", "2", "--notebook_port", str(free_port()))),
    }
    losses = {}
    for start, (launcher, options) in starts.items():
        (tmp_path / start).mkdir()
        summary = launch(tmp_path / start, launcher, "accelerate_loop", "--steps", "4", *options)
        assert summary["eval_rows"] == 24
        losses[start] = summary["losses"]
        AutoModelForCausalLM.from_pretrained(tmp_path / start / "model")
    assert losses["torchrun"] == losses["accelerate"] == losses["notebook"]
