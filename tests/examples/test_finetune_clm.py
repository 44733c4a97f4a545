"""The fine-tuning example runs without a network, and says in one paragraph what is wrong with its input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "examples" / "finetune_clm.py")
SHORT = ["--scratch_steps", "2", "--max_steps", "2", "--block_size", "32", "--per_device_train_batch_size", "2"]


def launch(directory: Path, *options: str, cores: int = 2) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(cores)] if cores > 1 else []
    command = [sys.executable, *launcher, SCRIPT, "--output_dir", str(directory), *SHORT, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": "0"}
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=400)


def test_two_cores_train_from_scratch_then_fine_tune_a_text_file(tmp_path):
    first = launch(tmp_path, "--tensor_parallel_size", "2")
    assert first.returncode == 0, first.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["losses"]) == 2
    assert len(summary["peak_hbm_bytes"]) == 2 and min(summary["peak_hbm_bytes"]) > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path)) == 2048

    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    options = ["--model", str(tmp_path), "--dataset", "text.txt", "--eval_rows", "2"]
    second = launch(tmp_path / "one", *options, cores=1) if (tmp_path / "one").mkdir() is None else None
    assert second is not None and second.returncode != 0  # the file is not there, relative to the other directory
    assert second.stderr.strip().splitlines()[-1].startswith("FileNotFoundError: There is no file text.txt")
    third = launch(tmp_path, *options, cores=1)
    assert third.returncode == 0, third.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("cores", "options", "error"),
    [
        (1, ["--tensor_parallel_size", "2"], "MeshError: tensor_parallel_size=2 needs 2 processes"),
        (2, ["--tensor_parallel_size", "3"], "MeshError: tensor_parallel_size 3 does not divide the world size 2"),
    ],
)
def test_a_wrong_world_size_is_one_paragraph_and_an_exit_code(tmp_path, cores, options, error):
    result = launch(tmp_path, *options, cores=cores)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if error in line]
    assert len(said) == cores
    assert "Traceback" not in result.stderr.split("torch.distributed.elastic")[0].split(error)[0]


def test_rows_are_packed_to_a_fixed_length(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_clm

    tokenizer = finetune_clm.train_tokenizer(["some words", "some more words"], 300)
    rows = finetune_clm.pack(Dataset.from_dict({"text": ["some words", "more", "words"]}), tokenizer, "text", 3)
    tokens = [token for row in rows["input_ids"] for token in row]
    assert {len(row) for row in rows["input_ids"]} == {3}
    assert "some words<|endoftext|>more<|endoftext|>" in tokenizer.decode(tokens) + tokenizer.decode(tokens)
    with pytest.raises(OSError, match="columns .*'text'.*none of them title: set --text_column"):
        finetune_clm.pack(Dataset.from_dict({"text": ["a"]}), tokenizer, "title", 3)
    with pytest.raises(OSError, match="lower --block_size"):
        finetune_clm.pack(Dataset.from_dict({"text": ["a"]}), tokenizer, "text", 30)
