"""Every feature of Trainer gives on a mesh what it gives in one process."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.hub import Hub, online
from tests.trainer.features import FEATURES, Kit, pushed_to_the_hub

MESHES = {
    "tp2": (2, 1, dict(tensor_parallel_size=2)),
    "dp2": (2, 2, {}),
    "pp2": (2, 1, dict(pipeline_parallel_size=2)),
    "tp2 x dp2": (4, 2, dict(tensor_parallel_size=2)),
    "pp2 x dp2": (4, 2, dict(pipeline_parallel_size=2)),
}


def walk(rank, world_size, directory, replicas, own, names):
    torch.manual_seed(rank)  # nobody promised equal generators
    results = {}
    for name in names:
        try:
            results[name] = FEATURES[name](
                Kit(NeuronTrainer, NeuronTrainingArguments, f"{directory}/{name}", replicas, own)
            )
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return results


def assert_same(found, expected, path):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{path}[{number}]")
    elif isinstance(expected, float | np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=path)
    else:
        assert found == expected, path


def compare(tmp_path, mesh, names, device="neuron"):
    world_size, replicas, own = MESHES[mesh]
    ranks = run_ranks(walk, world_size, str(tmp_path / "ours"), replicas, own, names, device=device, timeout=300)
    for name in names:
        kit = Kit(Trainer, TrainingArguments, str(tmp_path / "stock" / name), 1, {"use_cpu": True})
        expected = FEATURES[name](kit)
        for rank, results in enumerate(ranks):
            if results[name] is not None or rank == 0:  # only rank 0 knows the best of several runs, as in transformers
                assert_same(results[name], expected, f"{name} on rank {rank}")


NOT_ON_SHARDS = {"labels_of_another_name"}  # a model without a plan
NOT_IN_A_PIPELINE = NOT_ON_SHARDS | {
    "reentrant_checkpointing",  # refused
    "activations_watched",  # refused
    "grouped_by_length",  # its second epoch is in another order: stages draw seeds from the generator that sorts rows
    "compiled",
}
ON_THE_CPU = {"noise_on_embeddings"}  # drawn from one process's generator
LEFT_OUT = {
    "tp2": NOT_ON_SHARDS,
    "dp2": set(),
    "pp2": NOT_IN_A_PIPELINE,
    "tp2 x dp2": NOT_ON_SHARDS,
    "pp2 x dp2": NOT_IN_A_PIPELINE,
}
SLOW = {"every_schedule", "compiled", "hyperparameter_search"}
NAMES = [name for name in FEATURES if name not in ON_THE_CPU]


def test_features_on_tensor_parallel_ranks(tmp_path):
    compare(tmp_path, "tp2", [name for name in NAMES if name not in NOT_ON_SHARDS | SLOW])


def test_features_that_count_data_parallel_ranks(tmp_path):
    compare(tmp_path, "dp2", ["mean_losses", "grouped_by_length", "split_batches", "labels_of_another_name"])


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_features_on_every_mesh(tmp_path, mesh):
    compare(tmp_path, mesh, [name for name in NAMES if name not in LEFT_OUT[mesh]])


@pytest.mark.full
def test_features_that_draw_random_numbers(tmp_path):
    compare(tmp_path, "tp2", sorted(ON_THE_CPU), device="cpu")


def push(rank, world_size, directory, endpoint):
    with online(endpoint):
        pushed_to_the_hub(Kit(NeuronTrainer, NeuronTrainingArguments, directory, 1, dict(tensor_parallel_size=2)))


def test_checkpoints_and_the_result_are_pushed_by_rank_0(tmp_path):
    with Hub() as hub:
        run_ranks(push, 2, str(tmp_path), hub.endpoint)
    files = hub.repositories["somebody/model"]["main"]
    (tmp_path / "pushed").mkdir()
    for name in ("config.json", "model.safetensors", "last-checkpoint/trainer_state.json", "README.md"):
        assert name in files, f"{name} is not among {sorted(files)}"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "pushed" / name).write_bytes(files[name])
    pushed, saved = (
        LlamaForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "pushed", tmp_path / "1")
    )
    assert pushed.keys() == saved.keys()
    assert all(torch.equal(pushed[name], weight) for name, weight in saved.items())
    assert [commit["summary"] for commit in hub.commits if "checkpoint" not in commit["summary"]][-1] == "The end"
