"""Simulated ranks: the collectives of one process's threads give what those of processes give."""

import copy

import pytest
import torch
import torch.distributed as dist

from optimum_trn.errors import MeshError
from optimum_trn.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group
from optimum_trn.parallel.simulated import SimulatedRanks


def test_collectives_and_their_gradients_are_those_of_three_ranks():
    ranks = SimulatedRanks(3)
    groups = ranks.groups()

    def work(rank):
        group = groups[rank].process_group
        leaf = torch.full((2,), float(rank + 1), requires_grad=True)
        total = reduce_from_group(copy_to_group(leaf, group) * 2, group)
        (gather_from_group(total, group, 0) * (rank + 1)).sum().backward()
        biggest = leaf.detach().clone()
        dist.all_reduce(biggest, op=dist.ReduceOp.MAX, group=group)
        return total.tolist(), leaf.grad.tolist(), biggest.tolist()

    # The loss of rank r weighs its own gathered part by r + 1; the gradients of the ranks meet at the copy.
    assert ranks.run(work) == [([12.0, 12.0], [12.0, 12.0], [3.0, 3.0])] * 3


def test_a_lost_partial_sum_is_that_of_the_last_rank():
    ranks = SimulatedRanks(2)
    groups = ranks.groups()
    ranks.loses = True
    results = ranks.run(lambda rank: groups[rank].leave(torch.tensor(float(10**rank))).item())
    assert results == [1.0, 1.0]


def test_ranks_that_call_different_collectives_are_refused():
    ranks = SimulatedRanks(2)
    groups = ranks.groups()
    with pytest.raises(MeshError, match="do not call"):
        ranks.run(lambda rank: groups[0].leave(torch.ones(1)) if rank == 0 else None)
    with pytest.raises(MeshError, match="shapes"):
        ranks.run(lambda rank: groups[rank].leave(torch.ones(1 + rank)))


def test_the_error_of_a_rank_is_raised():
    ranks = SimulatedRanks(2)
    groups = ranks.groups()

    def work(rank):
        if rank == 1:
            raise ZeroDivisionError("rank 1")
        groups[rank].leave(torch.ones(1))

    with pytest.raises((ZeroDivisionError, MeshError)):
        ranks.run(work)


def test_copies_of_a_module_share_the_group():
    (group,) = SimulatedRanks(1).groups()
    assert copy.deepcopy(group) is group
