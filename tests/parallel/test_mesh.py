"""Degrees multiply out to the world size, or the error says what would."""

import copy
import pickle
import warnings

import pytest
import torch.distributed as dist

from optimum_trn.errors import MeshError
from optimum_trn.parallel import ParallelConfig, RankGroup
from optimum_trn.parallel.mesh import axis_of
from tests.devices import DEVICES
from tests.distributed import run_ranks


def test_data_parallel_is_what_is_left():
    assert ParallelConfig().data_parallel_size(4) == 4
    assert ParallelConfig(tensor_parallel_size=4).data_parallel_size(32) == 8


def test_degrees_that_do_not_divide_the_world_are_named_with_those_that_do():
    with pytest.raises(MeshError, match=r"tensor_parallel_size 4 does not divide the world size 6.*\[1, 2, 3, 6\]"):
        ParallelConfig(tensor_parallel_size=4).data_parallel_size(6)
    for wrong in (0, -2, 1.5, "2"):
        with pytest.raises(MeshError, match="positive integer"):
            ParallelConfig(tensor_parallel_size=wrong)


def test_the_axes_multiply_out_to_the_world():
    sizes = ParallelConfig(tensor_parallel_size=2).axis_sizes(8)
    assert list(sizes.items()) == [("pp", 1), ("dp_replicate", 4), ("dp_shard", 1), ("cp", 1), ("tp", 2)]


def test_one_process_needs_no_mesh():
    assert ParallelConfig().build_mesh() is None
    with pytest.raises(MeshError, match="world size 1"):
        ParallelConfig(tensor_parallel_size=2).build_mesh()


def neighbours(rank, world_size):
    mesh = ParallelConfig(tensor_parallel_size=2).build_mesh()
    assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of flattened dimensions that are sliced by name
        assert (axis_of(mesh, "dp").size(), axis_of(mesh, "dp_cp").size(), axis_of(mesh, "tp").size()) == (2, 2, 2)
    assert mesh.get_local_rank("dp") == mesh.get_local_rank("dp_cp") == rank // 2
    group = RankGroup(mesh.get_group("tp"))
    assert copy.deepcopy(group) is group
    again = pickle.loads(pickle.dumps(group))
    assert again.process_group is group.process_group and (again.rank, again.size) == (rank % 2, 2)
    return dist.get_process_group_ranks(group.process_group)


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_parallel_ranks_are_neighbours_and_groups_survive_copies(device):
    assert run_ranks(neighbours, 4, device=device) == [[0, 1], [0, 1], [2, 3], [2, 3]]
