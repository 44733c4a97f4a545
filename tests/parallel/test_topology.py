"""Placement: tensor parallelism inside a chip where it fits, then inside an instance; a node is what torchrun says."""

import os

import pytest

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.topology import Topology, groups_of, launched_topology, placement_summary, placement_table
from tests.distributed import run_ranks

TWO_NODES = Topology(nodes=(0,) * 8 + (1,) * 8, cores_per_chip=4)


@pytest.mark.parametrize(
    ("size", "tensor", "data"),
    [(2, "inside a chip", "across instances"), (4, "inside a chip", "across instances")]
    + [(8, "inside an instance", "across instances"), (16, "across instances", None)],
)
def test_the_summary_names_the_slowest_link_of_each_axis(size, tensor, data):
    summary = placement_summary(ParallelConfig(tensor_parallel_size=size), TWO_NODES)
    assert f"tp: {16 // size} group{'s' if size < 16 else ''} of {size}, {tensor}" in summary
    assert (f"dp_replicate: {size} groups of {16 // size}, {data}" in summary) == (data is not None)


def test_the_table_has_every_rank_once_with_its_core_and_place():
    lines = placement_table(ParallelConfig(tensor_parallel_size=2), TWO_NODES).splitlines()
    header = next(n for n, line in enumerate(lines) if line.split()[0] == "rank")
    assert lines[header].split() == ["rank", "node", "chip", "core", "dp_replicate", "tp"]
    found = [tuple(map(int, line.split())) for line in lines[header + 1 :]]
    assert found == [(r, r // 8, r % 8 // 4, r % 8, r // 2, r % 2) for r in range(16)]


def test_groups_follow_the_order_of_the_axes():
    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert groups_of(["tp"], sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(["dp_shard"], sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_of(["pp", "dp_shard"], sizes) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def nodes(rank, world_size):
    os.environ.update(GROUP_RANK=str(int(rank > 0)), GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE=str(2 if rank else 1))
    topology = launched_topology(world_size)
    return topology.nodes, [topology.core(r) for r in range(world_size)]


def test_nodes_of_different_sizes_are_known_from_what_torchrun_says():
    assert run_ranks(nodes, 3) == [((0, 1, 1), [0, 0, 1])] * 3
