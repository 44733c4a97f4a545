"""The size of MiCS groups, where it is left to the trainer."""

import pytest

from optimum_trn.errors import MeshError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.trainer.partition import resolved
from tests.trainer import scenario


def test_an_automatic_size_is_the_smallest_with_room_for_the_model(monkeypatch):
    config = ParallelConfig(tensor_parallel_size=2, mics_partition_size="auto")
    model = scenario.llama()
    assert resolved(config, model, 8) == ParallelConfig(tensor_parallel_size=2, mics_partition_size=1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    room = 16 * parameters / 2 / 2 / 0.9  # for the half that a tensor-parallel rank has, shared by two
    monkeypatch.setattr("optimum_trn.hardware.ChipSpec.hbm_bytes_per_core", lambda *_: room)
    assert resolved(config, model, 8).mics_partition_size == 2
    monkeypatch.setattr("optimum_trn.hardware.ChipSpec.hbm_bytes_per_core", lambda *_: room / 100)
    with pytest.raises(MeshError, match="Launch more processes, or raise tensor_parallel_size"):
        resolved(config, model, 8)


def test_a_size_that_needs_the_model_is_refused_without_it_and_one_that_does_not_is_kept():
    with pytest.raises(MeshError, match="needs to see the model"):
        resolved(ParallelConfig(mics_partition_size="auto"), None, 4)
    assert resolved(ParallelConfig(mics_partition_size=2), None, 4).mics_partition_size == 2
