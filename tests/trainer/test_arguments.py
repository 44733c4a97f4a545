"""Degrees that can't work are refused before anything is loaded, and say what would."""

import sys
from dataclasses import fields

import pytest

from optimum_trn.errors import MeshError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.trainer import NeuronTrainingArguments
from optimum_trn.trainer.refusals import REFUSALS
from tests.distributed import run_ranks


def test_one_process_that_wants_two_cores_says_how_to_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words"])
    with pytest.raises(MeshError) as error:
        NeuronTrainingArguments(output_dir=str(tmp_path), tensor_parallel_size=2)
    assert "tensor_parallel_size=2 needs 2 processes" in str(error.value)
    assert "`torchrun --nproc-per-node 2 train.py --name 'two words'`" in str(error.value)
    assert "`accelerate launch --num_processes 2 train.py --name 'two words'`" in str(error.value)


def test_a_launcher_with_the_wrong_number_of_processes_is_refused_before_the_process_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match="tensor_parallel_size 3 does not divide the world size 4"):
        NeuronTrainingArguments(output_dir=str(tmp_path), tensor_parallel_size=3)


@pytest.mark.parametrize("size", [0, -1, "2", 1.5])
def test_a_size_is_a_positive_integer(tmp_path, size):
    with pytest.raises(MeshError, match="positive integer"):
        NeuronTrainingArguments(output_dir=str(tmp_path), tensor_parallel_size=size)


REFUSED = [
    ("fsdp", True, "mics_partition_size=N shards weights"),
    ("deepspeed", "config.json", "zero_1 shards optimizer states"),
    ("parallelism_config", object(), "tensor_parallel_size, context_parallel_size"),
    ("auto_find_batch_size", True, "Set per_device_train_batch_size"),
    ("enable_jit_checkpoint", True, "save_steps"),
    ("use_liger_kernel", True, "Triton for GPUs"),
    ("fp16", True, "set bf16=True instead"),
    ("fp16_full_eval", True, "set bf16_full_eval=True instead"),
    ("debug", "tpu_metrics_debug", "XLA devices"),
    ("ddp_backend", "nccl", "through the backend neuron"),
]


@pytest.mark.parametrize("name, value, text", REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_with_a_reason(tmp_path, monkeypatch, name, value, text):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=text) as error:
        NeuronTrainingArguments(output_dir=str(tmp_path), **{name: value})
    assert f"{name}={value!r} is refused: " in str(error.value)


def test_overflows_are_not_looked_for_in_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="no stage of a pipeline has"):
        NeuronTrainingArguments(output_dir=str(tmp_path), debug="underflow_overflow", pipeline_parallel_size=2)


SURVIVING = [
    ("tensor_parallel_size", 2),
    ("pipeline_parallel_size", 2),
    ("context_parallel_size", 2),
    ("expert_parallel_size", 2),
    ("gradient_checkpointing", True),
    ("activation_checkpointing", True),
    ("recompute", "full"),
    ("mics_partition_size", "auto"),
    ("fsdp", True),
    ("deepspeed", "config.json"),
    ("torch_compile", True),
    ("load_best_model_at_end", True),
    ("auto_find_batch_size", True),
    ("enable_jit_checkpoint", True),
]


@pytest.mark.parametrize("name, value", SURVIVING, ids=[name for name, _ in SURVIVING])
def test_what_cannot_survive_losses_is_refused_with_a_reason(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv("OPTIMUM_TRN_CONTROLLER", "127.0.0.1:1")
    monkeypatch.setenv("OPTIMUM_TRN_FAULT_TOLERANCE", "1")
    with pytest.raises(ValueError, match=f"{name}={value!r} is refused: .* Leave it"):
        NeuronTrainingArguments(output_dir=str(tmp_path), **{name: value})


def test_fault_tolerance_says_how_to_launch_and_takes_what_the_launcher_was_given(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ValueError, match="`optimum-trn launch --nodes N -f 2 train.py`"):
        NeuronTrainingArguments(output_dir=str(tmp_path), fault_tolerance=2)
    monkeypatch.setenv("OPTIMUM_TRN_CONTROLLER", "127.0.0.1:1")
    monkeypatch.setenv("OPTIMUM_TRN_FAULT_TOLERANCE", "1")
    assert NeuronTrainingArguments(output_dir=str(tmp_path)).fault_tolerance == 1
    with pytest.raises(ValueError, match="fault_tolerance=2, but `optimum-trn launch` was given -f 1"):
        NeuronTrainingArguments(output_dir=str(tmp_path), fault_tolerance=2)


def test_every_refusal_has_a_case():
    elsewhere = {"predict_with_generate"}  # test_seq2seq.py
    cases = {name for name, *_ in [*REFUSED, *SURVIVING]}
    assert {refusal.argument for refusal in REFUSALS} == cases | elsewhere


def test_tf32_is_refused_by_transformers_and_its_absence_is_not(tmp_path):
    with pytest.raises(ValueError, match="tf32"):
        NeuronTrainingArguments(output_dir=str(tmp_path), tf32=True)
    assert NeuronTrainingArguments(output_dir=str(tmp_path), tf32=False).tf32 is False


def test_every_degree_is_an_argument_with_the_same_default():
    stock = {field.name: field.default for field in fields(NeuronTrainingArguments)}
    assert {field.name: field.default for field in fields(ParallelConfig)}.items() <= stock.items()


def test_the_size_of_a_partition_may_be_text_as_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert NeuronTrainingArguments(output_dir=str(tmp_path), mics_partition_size="1").mics_partition_size == 1
    with pytest.raises(MeshError, match="mics_partition_size 2 does not divide the 1 data-parallel ranks"):
        NeuronTrainingArguments(output_dir=str(tmp_path), mics_partition_size="2")


def wrong_world(rank, world_size, directory):
    try:
        NeuronTrainingArguments(output_dir=directory, tensor_parallel_size=3)
    except MeshError as error:
        return str(error)


def test_every_rank_raises(tmp_path):
    texts = run_ranks(wrong_world, 2, str(tmp_path))
    assert len(set(texts)) == 1
    assert "tensor_parallel_size 3 does not divide the world size 2" in texts[0]
