"""A Trainer whose checkpoints are in a pool resumes from them as from a directory."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from optimum_trn import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.pool.filesystem import PoolFileSystem

from .pools import a_pool


def trainer(url, steps):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 16))]
    return NeuronTrainer(
        model=model,
        args=NeuronTrainingArguments(
            output_dir=url, max_steps=steps, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            save_steps=2, save_total_limit=2, learning_rate=1e-2, disable_tqdm=True,
        ),
        train_dataset=data,
    )  # fmt: skip


@pytest.mark.full
def test_checkpoints_in_a_pool_are_rotated_resumed_from_and_stock(tmp_path, monkeypatch):
    with a_pool(3, rate=None) as pool:
        pool.address.save(tmp_path / "pool.json")
        monkeypatch.setenv("OPTIMUM_TRN_POOL", str(tmp_path / "pool.json"))
        monkeypatch.setenv("OPTIMUM_TRN_OUTPUTS", str(tmp_path / "first"))
        whole = trainer("pool://run", 6)
        whole.train()
        names = {name.split("/")[1] for name in pool.files("run/")}
        assert {"checkpoint-4", "checkpoint-6"} <= names and "checkpoint-2" not in names
        monkeypatch.setenv("OPTIMUM_TRN_OUTPUTS", str(tmp_path / "other host"))
        resumed = trainer("pool://run", 8)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 8
        assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry][-2:] == [7, 8]
        PoolFileSystem(pool).get("run/checkpoint-8", str(tmp_path / "copy"), recursive=True)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
        for ours, theirs in zip(resumed.model.parameters(), stock.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)
