"""The classification example learns real text without a network, and says in one paragraph what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from examples import finetune_text_classification as example

ROOT = Path(__file__).resolve().parent.parent.parent


def launch(directory: Path, *options: str, cores: int = 2) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(cores)] if cores > 1 else []
    script = str(ROOT / "examples" / "finetune_text_classification.py")
    command = [sys.executable, *launcher, script, "--output_dir", str(directory), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": "0"}
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=400)


def check(directory: Path, result: subprocess.CompletedProcess, accuracy: float) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((directory / "summary.json").read_text())
    assert len(summary["labels"]) == 8 and summary["accuracy_before"] < 0.3
    assert summary["accuracy_after"] > accuracy, summary


@pytest.mark.full
def test_two_cores_learn_from_scratch_which_package_a_docstring_is_from(tmp_path):
    check(tmp_path, launch(tmp_path, "--tensor_parallel_size", "2", "--num_train_epochs", "4"), accuracy=0.3)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 2048


@pytest.mark.full
@pytest.mark.parametrize("cores", [2, 3])
def test_real_weights_do_better(tmp_path, cores):
    try:
        example.minilm_directory()
    except FileNotFoundError as error:
        pytest.skip(f"no real weights: {error}")
    options = ["--model", "minilm", "--learning_rate", "2e-4", "--num_train_epochs", "4"]
    check(tmp_path, launch(tmp_path, "--tensor_parallel_size", str(cores), *options, cores=cores), accuracy=0.7)
    classify = pipeline(
        "text-classification",
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path),
    )
    answer = classify("Run a coroutine in the given event loop and return its future, which may be awaited.")
    assert answer[0]["label"] == "asyncio"


def test_a_file_without_the_columns_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file nowhere.csv"):
        example.read_texts(example.ExampleArguments(dataset="nowhere.csv"))
    file = tmp_path / "texts.csv"
    file.write_text("text,kind\nwords,good\n")
    with pytest.raises(OSError, match=r"columns \['text', 'kind'\], but not \['label'\]"):
        example.read_texts(example.ExampleArguments(dataset=str(file)))
    file.write_text("text,label\nwords,good\nmore words,bad\n")
    assert example.read_texts(example.ExampleArguments(dataset=str(file))).features["label"].names == ["bad", "good"]
