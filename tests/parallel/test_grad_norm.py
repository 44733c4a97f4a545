"""The global norm counts every parameter once, however it lies on the ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimum_trn.parallel import Piece, Placement, clip_grad_norm_, grad_norm
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks

PLACEMENTS = {
    "split": Placement.split((4, 6), 2, 1),
    "replicated": Placement.replicate((5,), 2),
    "replicas": Placement((3, 2), 2, 0, ((Piece(0, 3),), (Piece(0, 3),))),
    "padded": Placement((3,), 2, 0, ((Piece(0, 2),), (Piece(2, 1), Piece(None, 1)))),
}


def norms(rank, world_size, norm_type, dtype):
    generator = torch.Generator().manual_seed(0)
    full, local = {}, {}
    for name, placement in PLACEMENTS.items():
        full[name] = nn.Parameter(torch.zeros(placement.global_shape, dtype=dtype))
        full[name].grad = torch.randn(placement.global_shape, generator=generator).to(dtype)
        local[name] = nn.Parameter(torch.zeros(placement.local_shape(rank), dtype=dtype, device=local_device()))
        local[name].grad = placement.shard(full[name].grad, rank).to(local_device())
    local["frozen"] = nn.Parameter(torch.zeros(2))
    group = dist.group.WORLD
    before = grad_norm(local.items(), PLACEMENTS, group, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(full.values(), 0.5, norm_type)
    assert torch.equal(before, clip_grad_norm_(local.items(), PLACEMENTS, group, 0.5, norm_type))
    torch.testing.assert_close(
        before.cpu(), expected.to(before.dtype), rtol=1e-6 if dtype != torch.bfloat16 else 1e-2, atol=0
    )
    for name, placement in PLACEMENTS.items():
        torch.testing.assert_close(local[name].grad.cpu(), placement.shard(full[name].grad, rank))
    return before.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_norm_and_clipped_gradients_equal_those_of_the_whole_model_on_every_rank(norm_type, dtype, device):
    first, second = run_ranks(norms, 2, norm_type, dtype, device=device)
    assert torch.equal(first, second)


def test_one_process_needs_no_placements():
    parameter = nn.Parameter(torch.zeros(2))
    assert grad_norm([("a", parameter)], {}, None) == 0
    parameter.grad = torch.tensor([3.0, 4.0])
    assert grad_norm([("a", parameter)], {}, None) == 5
