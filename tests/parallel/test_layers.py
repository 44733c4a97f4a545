"""The layers that are cut over ranks: what they compute beyond what the parity of whole models shows."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimum_trn.parallel import RankGroup
from optimum_trn.parallel.replicated import SummedGradientForward
from optimum_trn.patching.styles import ColumnWise, RowWise, VocabParallel
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks


def cut(module, style, group):
    """A patched copy of the module."""
    module = copy.deepcopy(module)
    for name, placement in style.placements(module, group.size).items():
        parameter = module.get_parameter(name)
        parameter.data = placement.shard(parameter.data, group.rank)
    style.apply(module, group)
    return module.to(local_device())


def embedding(rank, world_size, padding_idx):
    group = RankGroup(dist.group.WORLD)
    stock = nn.Embedding(10, 3, padding_idx=padding_idx)
    local = cut(stock, VocabParallel(), group)
    ids = torch.tensor([[0, 4, 5, 9], [7, 7, 0, 4]])
    weights = torch.arange(24.0).reshape(2, 4, 3)
    output = local(ids.to(local_device()))
    assert torch.equal(output.cpu(), stock(ids))
    (output * weights.to(local_device())).sum().backward()
    (stock(ids) * weights).sum().backward()
    torch.testing.assert_close(local.weight.grad.cpu(), stock.weight.grad.chunk(world_size)[rank])
    for outside in (10, -1):
        with pytest.raises(RuntimeError, match="outside the vocabulary of 10"):
            local(torch.tensor([[0, outside]], device=local_device()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding_idx", [None, 0, 7])
def test_an_embedding_looks_up_only_its_own_range_and_refuses_what_is_outside_the_vocabulary(padding_idx, device):
    run_ranks(embedding, 2, padding_idx, device=device)


def standalone(rank, world_size):
    group, device = RankGroup(dist.group.WORLD), local_device()
    torch.manual_seed(0)
    up, down, x = nn.Linear(6, 8), nn.Linear(8, 5), torch.randn(2, 3, 6)
    column, row = cut(up, ColumnWise(copies_input=True), group), cut(down, RowWise(), group)
    assert column.weight.shape == (4, 6) and (column.out_features, row.in_features) == (8, 8)  # the whole layers'
    mine, theirs = x.clone().to(device).requires_grad_(), x.clone().requires_grad_()
    actual, expected = row(column(mine).relu()), down(up(theirs).relu())
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(actual.cpu(), expected)
    torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    torch.testing.assert_close(row.bias.grad.cpu(), down.bias.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_a_column_layer_without_a_block_sums_its_input_gradient_itself(device):
    run_ranks(standalone, 2, device=device)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x, *, twice=False):
        return self.offset + self.weight * x * (2 if twice else 1)


def accumulated(rank, world_size):
    module = Scale().to(local_device())
    weight = module.weight
    module.forward = SummedGradientForward(module, RankGroup(dist.group.WORLD))
    for micro_batch in (1.0, 10.0):
        module(torch.full((3,), micro_batch * (rank + 1), device=local_device()), twice=True).sum().backward()
    assert module.weight is weight and list(module.state_dict()) == ["weight", "offset"]
    assert torch.equal(weight.grad.cpu(), torch.full((3,), 2 * (1.0 + 10.0) * (1 + 2)))
    twin = copy.deepcopy(module)
    twin(torch.ones(3, device=local_device())).sum().backward()
    assert torch.equal(twin.weight.grad.cpu(), torch.full((3,), 2.0)) and twin.forward.module is twin


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_summed_once_each_micro_batch(device):
    """transformers 5.24 sums `Parameter.grad` in a hook, and so earlier micro-batches again with every later one."""
    run_ranks(accumulated, 2, device=device)
