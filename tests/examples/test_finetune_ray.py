"""Ray Train carries the job: two of its workers are two NeuronCores that share each layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent.parent

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.mark.full
def test_two_ray_workers_train_tensor_parallel(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "finetune_ray.py"), "--max_steps", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-5000:]
    directory = tmp_path / "outputs" / "finetune_ray"
    losses = json.loads((directory / "summary.json").read_text())["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(directory).config.hidden_size == 64
