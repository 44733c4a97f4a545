"""What a checkpoint must still be when it is resumed: what was written, or what its user put there on purpose."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_trn.errors import CheckpointError
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.trainer import scenario


def trainer(directory, **options):
    arguments = NeuronTrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        **options,
    )
    return NeuronTrainer(model=scenario.llama(num_hidden_layers=1), args=arguments, train_dataset=scenario.rows(8))


def losses(run):
    return [log["loss"] for log in run.state.log_history if "grad_norm" in log]


def test_weights_that_were_converted_are_resumed_from_and_the_log_says_that_they_are_not_checked(tmp_path, caplog):
    whole = trainer(tmp_path, max_steps=3)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, "optimum_trn"):
        resumed = trainer(tmp_path, max_steps=3)
        logging.getLogger("optimum_trn").addHandler(caplog.handler)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        logging.getLogger("optimum_trn").removeHandler(caplog.handler)
    assert losses(resumed) == losses(whole)
    assert "other weight files than were saved (pytorch_model.bin): not checked" in caplog.text


def test_weights_that_were_changed_under_their_name_are_refused_with_the_way_out(tmp_path):
    trainer(tmp_path, max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-1"
    weights = {name: weight * 2 for name, weight in load_file(checkpoint / "model.safetensors").items()}
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.safetensors .* If you replaced it on purpose, delete checkpoint"):
        trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "checkpoint.json").unlink()
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(checkpoint))


def test_a_weight_file_that_is_missing_is_missing(tmp_path):
    trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_of_what_a_killed_process_leaves_the_complete_is_resumed_from_and_the_rest_goes_with_the_next_save(tmp_path):
    """The three moments of a save: before the manifest is written, before the name is given, while one is deleted."""
    whole = trainer(tmp_path, max_steps=4, save_total_limit=None)
    whole.train()
    incomplete, complete = tmp_path / "_saving-checkpoint-4", tmp_path / "_saving-checkpoint-3"
    for outer in (incomplete, complete):
        outer.mkdir()
        name = outer.name.removeprefix("_saving-")
        (tmp_path / name).rename(outer / name)
    (incomplete / "checkpoint-4" / "checkpoint.json").unlink()
    (tmp_path / "checkpoint-1").rename(tmp_path / "_deleting-checkpoint-1")
    resumed = trainer(tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert (resumed.state.global_step, len(resumed.state.log_history)) == (4, len(whole.state.log_history))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
