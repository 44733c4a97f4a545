"""MiCS: the smallest groups that fit, gathers that cross between nodes once, one all-reduce a step over replicas."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimum_trn.errors import MeshError
from optimum_trn.hardware import GiB
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.mesh import NOT_WITH_MICS
from optimum_trn.parallel.mics import HierarchicalAllGather, partition, smallest_partition, without_replicas
from optimum_trn.parallel.topology import Topology
from optimum_trn.parallel.traffic import Traffic
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks


@pytest.mark.parametrize(
    ("parameters", "data_parallel_size", "size"),
    # 16 bytes a parameter: 20 GB a core for 10 billion over 8 cores, 12.5 GB for 100 billion over 128.
    [(10**8, 64, 1), (10**10, 64, 8), (10**11, 512, 128), (10**10, 24, 8), (10**10, 7, 7)],
)
def test_the_smallest_group_that_has_room_is_taken(parameters, data_parallel_size, size):
    assert smallest_partition(parameters, data_parallel_size, 24 * GiB) == size


def test_context_parallel_ranks_are_part_of_a_group_and_one_data_parallel_rank_is_none():
    assert smallest_partition(10**10, 64, 24 * GiB, context_parallel_size=4) == 2
    with pytest.raises(MeshError, match="4 cores with other data would hold 37.3 GiB"):
        smallest_partition(10**10, 2, 24 * GiB, context_parallel_size=2)
    with pytest.raises(MeshError, match="1 cores"):  # which would hold the whole
        smallest_partition(10**10, 1, 24 * GiB, context_parallel_size=64)


def test_a_model_that_fits_nowhere_is_refused_with_its_sizes():
    with pytest.raises(MeshError, match=r"10,000,000,000 parameters take 149.0 GiB.*4 cores with other data.*37.3 GiB"):
        smallest_partition(10**10, 4, 24 * GiB)


def gathered(rank, world_size, per_node, count):
    """A flat and a hierarchical all-gather, and what arrives at this rank from other nodes in each."""
    topology = Topology(tuple(r // per_node for r in range(world_size)), cores_per_chip=per_node)
    mesh = ParallelConfig(mics_partition_size=world_size).build_mesh()["dp_shard"]
    hierarchical = HierarchicalAllGather(mesh, per_node)
    chunk = torch.randn(count, device=local_device()) + rank
    flat = torch.empty(world_size * count, device=local_device())
    with Traffic(topology) as before:
        dist.all_gather_into_tensor(flat, chunk)
    result = torch.empty_like(flat)
    with Traffic(topology) as after:
        hierarchical(result, chunk, dist.group.WORLD)
    assert torch.equal(result, flat)
    return before.over("network"), after.over("network")


@pytest.mark.parametrize("device", DEVICES)
def test_a_hierarchical_gather_has_the_same_bits_and_the_smallest_possible_traffic_between_nodes(device):
    p, k, count = 4, 2, 6
    ranks = run_ranks(gathered, p, k, count, device=device)
    message = p * count * 4
    for node in range(p // k):
        flat, hierarchical = (sum(ranks[r][n] for r in range(node * k, node * k + k)) for n in range(2))
        assert flat == (p - 1) * message / p
        assert hierarchical == (p - k) * message / p


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).pow(2).sum()


def steps(rank, world_size, micro_batches, two_hops, partition_size=2, nodes=2):
    """Bytes that all-reduces over replicas, and other collectives over the network, bring; and the gradients."""
    mesh = ParallelConfig(mics_partition_size=partition_size).build_mesh()
    torch.manual_seed(0)
    model = Net().to(local_device())
    topology = Topology(tuple(r * nodes // world_size for r in range(world_size)), cores_per_chip=2)
    partition(model, mesh, list(model.layers), topology)
    generator = torch.Generator().manual_seed(rank)
    with Traffic(topology) as traffic:
        for number in range(micro_batches):
            batch = torch.randn(3, 6, generator=generator).to(local_device())
            if two_hops and number + 1 < micro_batches:
                with without_replicas(model):
                    model(batch).backward()
            else:
                model(batch).backward()
    reduced = sum(size for (name, _), size in traffic.received.items() if name == "allreduce_")
    gathered = traffic.received["_allgather_base_", "network"]
    return (reduced, gathered), [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_replicas_exchange_gradients_once_a_step_not_once_a_micro_batch(device):
    each = run_ranks(steps, 4, 4, False, device=device)
    once = run_ranks(steps, 4, 4, True, device=device)
    for ((bytes_each, _), grads_each), ((bytes_once, gathered), grads_once) in zip(each, once, strict=True):
        assert bytes_each == 4 * bytes_once > 0
        assert gathered == 0  # each group is on a node of its own
        torch.testing.assert_close(grads_once, grads_each)


def test_parameters_of_a_group_on_two_nodes_are_gathered_hierarchically():
    flat, hierarchical = (run_ranks(steps, 4, 1, True, partition_size=4, nodes=nodes) for nodes in (4, 2))
    on_wire = [sum(gathered for (_, gathered), _ in ranks) for ranks in (flat, hierarchical)]
    # A ring over 4 nodes takes 3/4 of the message into each; (p - k) M / p into each of 2 nodes is 2/4.
    assert on_wire[0] * 2 * 2 == on_wire[1] * 4 * 3
    assert all(map(torch.equal, flat[0][1], hierarchical[0][1]))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(MeshError, match="mics_partition_size 3 does not divide the 4 data-parallel ranks"):
        ParallelConfig(mics_partition_size=3).axis_sizes(4)
    with pytest.raises(MeshError, match='positive integer or "auto"'):
        ParallelConfig(mics_partition_size=0)
    for name in NOT_WITH_MICS:
        with pytest.raises(MeshError, match=f"can't be combined with {name}=2: .*zero_1, the default"):
            ParallelConfig(mics_partition_size=2, **{name: 2})
