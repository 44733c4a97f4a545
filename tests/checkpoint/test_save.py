"""A sharded model writes the files that its stock twin writes, whole or not at all."""

import errno
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_trn.checkpoint import save
from optimum_trn.checkpoint.safetensors_writer import SafetensorsWriter
from optimum_trn.errors import CheckpointError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model
from tests.checkpoint.stock_files import saved
from tests.devices import NEURON_FIRST
from tests.distributed import run_ranks
from tests.models.tiny import tiny_model


def load_and_save(rank, world_size, size, source, target, seen=None, **kwargs):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(size))
    model.save_pretrained(target, **kwargs)
    return sorted(os.listdir(target))


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("device", NEURON_FIRST)
@pytest.mark.parametrize("world_size, size", [(2, 2), (4, 2)])
@pytest.mark.parametrize("max_shard_size", ["50GB", "30KB"])
def test_every_byte_is_as_transformers_writes_it(tmp_path, max_shard_size, world_size, size, device):
    saved(tmp_path / "first", "qwen3", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "stock", max_shard_size=max_shard_size)
    listings = run_ranks(
        load_and_save,
        world_size,
        size,
        str(tmp_path / "first"),
        str(tmp_path / "ours"),
        max_shard_size=max_shard_size,
        device=device,
    )
    expected = contents(tmp_path / "stock")
    assert contents(tmp_path / "ours") == expected
    assert all(listing == sorted(expected) for listing in listings), "a rank left before the files were in place"
    assert len(expected) > 4 or max_shard_size == "50GB"


def patch_and_save(rank, world_size, target):
    model = tiny_model("llama", torch.float32)
    patch_model(model, ParallelConfig(world_size))
    save.save_pretrained(model, target)
    replaced = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    save.save_pretrained(model, target + "-doubled", state_dict=replaced, variant="doubled")


def test_a_model_that_was_patched_by_hand_is_saved_too_and_a_state_dict_replaces_its_tensors(tmp_path):
    run_ranks(patch_and_save, 2, str(tmp_path / "ours"), device="cpu")
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "stock")
    assert contents(tmp_path / "ours") == contents(tmp_path / "stock")
    doubled = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/ours-doubled", variant="doubled")
    assert torch.equal(doubled.lm_head.weight, 2 * model.lm_head.weight)


def save_over(rank, world_size, source, target, sizes):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(world_size))
    listings = []
    for size in sizes:
        model.save_pretrained(target, max_shard_size=size)
        listings.append(sorted(name for name in os.listdir(target) if "model" in name))
    return listings


def test_files_of_an_earlier_save_do_not_survive_in_another_layout(tmp_path):
    saved(tmp_path / "first")
    (tmp_path / "target" / ".saving-killed").mkdir(parents=True)
    listings = run_ranks(
        save_over, 2, str(tmp_path / "first"), str(tmp_path / "target"), ["50GB", "30KB", "60KB", "50GB"], device="cpu"
    )[0]
    assert listings[0] == listings[3] == ["model.safetensors"]
    for listing in listings[1:3]:
        assert "model.safetensors" not in listing and "model.safetensors.index.json" in listing
        assert len({name[-len("00001.safetensors") :] for name in listing if "-of-" in name}) == 1
    assert not list((tmp_path / "target").glob(".saving-*"))


def save_on_a_full_disk(rank, world_size, source, target):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(world_size))
    model.save_pretrained(target)
    before = {name: open(os.path.join(target, name), "rb").read() for name in os.listdir(target)}
    append, count = SafetensorsWriter.append, 0

    def full(writer, block):
        nonlocal count
        count += 1
        if count == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, block)

    with torch.no_grad():
        model.lm_head.weight.zero_()
    SafetensorsWriter.append = full
    try:
        with pytest.raises(CheckpointError) as error:
            model.save_pretrained(target)
    finally:
        SafetensorsWriter.append = append
    after = {name: open(os.path.join(target, name), "rb").read() for name in os.listdir(target)}
    assert after == before
    model.save_pretrained(target)  # the ranks are still in step
    return str(error.value)


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_old_files(tmp_path, device):
    saved(tmp_path / "first")
    first, second = run_ranks(save_on_a_full_disk, 2, str(tmp_path / "first"), str(tmp_path / "target"), device=device)
    assert "No space left on device" in first and "\n" not in first
    assert "failed on rank 0" in second and "No space left on device" in second


def save_where_a_file_is(rank, world_size, source, target):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(world_size))
    with pytest.raises(CheckpointError) as error:
        model.save_pretrained(target)
    with pytest.raises(CheckpointError, match="upload_folder"):
        model.save_pretrained(target + "-hub", push_to_hub=True)
    return str(error.value)


def test_what_cannot_be_saved_says_so_on_every_rank(tmp_path):
    saved(tmp_path / "first")
    (tmp_path / "target").write_text("a file")
    messages = run_ranks(save_where_a_file_is, 2, str(tmp_path / "first"), str(tmp_path / "target"), device="cpu")
    assert all("File exists" in message for message in messages)
    assert (tmp_path / "target").read_text() == "a file"


def save_and_die(rank, world_size, source, target):
    model = NeuronModelForCausalLM.from_pretrained(source, ParallelConfig(world_size))
    model.save_pretrained(target)
    if rank == 0:
        count = 0
        append = SafetensorsWriter.append

        def die(writer, block):
            nonlocal count
            count += 1
            if count == 5:
                os._exit(9)
            append(writer, block)

        SafetensorsWriter.append = die
    with torch.no_grad():
        model.lm_head.weight.zero_()
    try:
        model.save_pretrained(target)
    except Exception as error:
        return type(error).__name__


def test_a_writer_that_is_killed_leaves_the_old_files_and_its_peers_get_an_error(tmp_path):
    model = saved(tmp_path / "first")
    results = run_ranks(save_and_die, 2, str(tmp_path / "first"), str(tmp_path / "target"), device="cpu", may_die=[0])
    assert results[1] is not None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    json.loads((tmp_path / "target" / "config.json").read_text())
