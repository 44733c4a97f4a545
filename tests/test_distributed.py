"""The launcher itself: results in rank order, failures and hangs are told, and the pool recovers."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def total(rank, world_size, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item(), os.getpid()


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one is unhappy")
    return rank


def hang_on_one(rank, world_size):
    if rank == 1:
        dist.barrier()  # rank 0 never comes


def die_on_one(rank, world_size):
    if rank == 1:
        os._exit(7)
    return "survived"


def test_workers_are_reused_and_results_come_in_rank_order():
    first = run_ranks(total, 2, 1, device="cpu")
    second = run_ranks(total, 2, 2, device="cpu")
    assert [value for value, _ in first] == [3.0, 3.0]
    assert [value for value, _ in second] == [5.0, 5.0]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_a_failing_hanging_or_dying_rank_fails_the_test_and_the_pool_recovers():
    with pytest.raises(RankError, match="rank one is unhappy"):
        run_ranks(fail_on_one, 2, device="cpu")
    with pytest.raises(RankError, match="no answer in time"):
        run_ranks(hang_on_one, 2, device="cpu", timeout=3)
    with pytest.raises(RankError, match="ended with code 7"):
        run_ranks(die_on_one, 2, device="cpu")
    assert run_ranks(die_on_one, 2, device="cpu", may_die=[1]) == ["survived", None]
    assert [value for value, _ in run_ranks(total, 2, 0, device="cpu")] == [1.0, 1.0]
