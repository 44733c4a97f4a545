"""Each collective has the gradient of what it computes, and leaves alone what it was given."""

import pytest
import torch
import torch.distributed as dist

from optimum_trn.parallel import Placement
from optimum_trn.parallel.collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    unshard_from_group,
)
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks


def conjugates(rank, world_size):
    group, device = dist.group.WORLD, local_device()
    ranks = torch.arange(world_size, device=device, dtype=torch.float32)
    seed = torch.full((2, 3), 1.0 + rank, device=device)  # a gradient that differs between ranks
    kept = seed.clone()

    x = torch.full((2, 3), float(rank), device=device, requires_grad=True)
    copied = copy_to_group(x, group)
    copied.backward(seed)
    assert torch.equal(copied, x) and torch.equal(x.grad, torch.full_like(x, (1 + ranks).sum().item()))

    y = torch.full((2, 3), float(rank), device=device, requires_grad=True)
    reduced = reduce_from_group(y, group)
    reduced.backward(seed)
    assert torch.equal(reduced, torch.full_like(y, ranks.sum().item())) and torch.equal(y.grad, seed)
    assert torch.equal(y.detach(), torch.full_like(y, rank)) and torch.equal(seed, kept)

    z = torch.full((2, 3), float(rank), device=device, requires_grad=True)
    gathered = gather_from_group(z, group, dim=-1)
    weights = torch.arange(3.0 * world_size, device=device)
    (gathered * weights).sum().backward()
    assert torch.equal(gathered[0], ranks.repeat_interleave(3))
    assert torch.equal(z.grad[1], weights[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_copy_and_reduce_are_conjugate_and_gather_returns_the_own_slice(world_size, device):
    run_ranks(conjugates, world_size, device=device)


def whole(rank, world_size):
    full = torch.arange(24.0, device=local_device()).reshape(4, 6)
    placement = Placement.split(full.shape, world_size, 1)
    local = placement.shard(full, rank).requires_grad_()
    result = unshard_from_group(local, placement, dist.group.WORLD)
    assert torch.equal(result, full) and not result.requires_grad
    assert unshard_from_group(local.to("meta"), placement, dist.group.WORLD).shape == (4, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_every_rank_gets_the_whole_of_a_sharded_tensor(device):
    run_ranks(whole, 2, device=device)
