"""The README stays true: its table of models is the registry, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_trn.patching import supported_models
from tests.devices import NEURON_FIRST

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_models_is_the_registry():
    section = README.split("## Supported models")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert sorted(re.findall(r"`([a-z0-9_-]+)`", table)) == sorted(supported_models())


DATASET = """
import torch
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 12))]
"""


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_the_script_runs_as_it_stands_under_torchrun(tmp_path, device):
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    script = README.split("```python\n")[1].split("```")[0]
    model_id = re.search(r'from_pretrained\("([^"]+)"', script).group(1)
    (tmp_path / "script.py").write_text(DATASET + script.replace(model_id, str(tmp_path / "model")))
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPTIMUM_TRN_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 16


def test_every_command_and_link_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE):
        assert target in targets, f"the README names `make {target}`"
    for path in re.findall(r"(?:pytest |python |\]\()([A-Za-z_./]+(?:\.py|\.md|tests/[a-z_/]+))", README):
        assert (ROOT / path).exists(), f"the README names {path}"
