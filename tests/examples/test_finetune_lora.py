"""The LoRA example runs without a network, and stock PEFT on the stock model has its evaluation loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = ["--scratch_steps", "2", "--max_steps", "3", "--block_size", "32", "--per_device_train_batch_size", "2"]


@pytest.mark.full
def test_adapters_of_two_cores_give_stock_peft_the_same_loss(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/finetune_lora.py"]
    options = ["--output_dir", str(tmp_path), "--tensor_parallel_size", "2", "--scratch_vocabulary", "300", *SHORT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": "0"}
    result = subprocess.run(
        [*command, *options], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"] and len(summary["losses"]) == 3

    stock = AutoModelForCausalLM.from_pretrained(summary["model"], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(stock, tmp_path, is_trainable=True)
    counts = adapted.get_nb_trainable_parameters()
    assert counts == (summary["trainable_parameters"], summary["parameters"])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_clm

    example = finetune_clm.ExampleArguments()
    tokenizer = AutoTokenizer.from_pretrained(summary["model"])
    rows = finetune_clm.pack(finetune_clm.read_texts(example), tokenizer, "text", 32)
    tokens = torch.tensor(rows.train_test_split(example.eval_rows, seed=42)["test"]["input_ids"])
    with torch.no_grad():
        loss = adapted.eval()(input_ids=tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(summary["eval_loss_after"], rel=1e-5)
