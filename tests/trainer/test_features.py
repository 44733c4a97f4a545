"""Every feature of Trainer gives on a mesh what it gives in one process."""

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from tests.distributed import run_ranks
from tests.trainer.features import FEATURES, Kit

MESHES = {
    "tp2": (2, 1, dict(tensor_parallel_size=2)),
    "dp2": (2, 2, {}),
    "pp2": (2, 1, dict(pipeline_parallel_size=2)),
    "tp2 x dp2": (4, 2, dict(tensor_parallel_size=2)),
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


NOT_IN_A_PIPELINE = {"reentrant_checkpointing"}


@pytest.mark.parametrize("mesh", ["tp2", "dp2", pytest.param("pp2", marks=pytest.mark.full), "tp2 x dp2"])
def test_features_on_a_mesh_are_those_of_one_process(tmp_path, mesh):
    compare(tmp_path, mesh, [name for name in FEATURES if mesh != "pp2" or name not in NOT_IN_A_PIPELINE])
