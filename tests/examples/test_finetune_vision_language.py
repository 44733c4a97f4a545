"""The vision-language example learns colours without a network, and saves what stock transformers answers with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from examples import finetune_vision_language as example

ROOT = Path(__file__).resolve().parent.parent.parent


def launch(directory: Path, *options: str, cores: int = 2) -> dict:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(cores)] if cores > 1 else []
    script = str(ROOT / "examples" / "finetune_vision_language.py")
    command = [sys.executable, *launcher, script, "--output_dir", str(directory), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": "0"}
    result = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.full
def test_two_cores_learn_colours_and_save_stock_files(tmp_path):
    summary = launch(tmp_path, "--tensor_parallel_size", "2", "--num_train_epochs", "3")
    assert summary["losses"][-1] < 0.7 * summary["losses"][0]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    rows = example.collate(example.examples(48, 32, model.config, seed=2))
    with torch.no_grad():
        says = model(**rows).logits[:, -2].argmax(-1)
    right = (says == rows["labels"][:, -1]).float().mean().item()
    assert right == pytest.approx(summary["accuracy_after"], abs=0.03) and right > 0.25


@pytest.mark.full
def test_one_core_and_four_learn_the_same(tmp_path):
    options = ["--num_train_epochs", "1"]
    for cores in (1, 2, 4):
        (tmp_path / str(cores)).mkdir()
    one = launch(tmp_path / "1", *options, cores=1)
    for cores in (2, 4):
        more = launch(tmp_path / str(cores), *options, "--tensor_parallel_size", str(cores), cores=cores)
        assert more["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert one["losses"][-1] < one["losses"][0]


def test_patches_are_those_of_the_merged_tokens_in_order():
    image = torch.arange(3 * 16 * 16, dtype=torch.float32).reshape(3, 16, 16)
    config = example.tiny_config().vision_config
    rows, grid = example.patches(image, config)
    assert grid == [1, 4, 4] and rows.shape == (16, 3 * 2 * 4 * 4)
    frames = rows.reshape(16, 3, 2, 4, 4)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    for row, (top, left) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4), (0, 8)]):
        assert torch.equal(frames[row, :, 0], image[:, top : top + 4, left : left + 4])
