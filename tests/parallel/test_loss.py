"""The vocabulary-parallel cross-entropy is the stock one, without the full logits."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from optimum_trn.parallel import RankGroup
from optimum_trn.parallel.loss import VocabParallelCausalLMLoss, vocab_parallel_cross_entropy
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks

VOCAB = 13  # of which the last of two ranks has one token less: its last logit is padding


def both(rank, world_size, dtype, **arguments):
    """Loss and logit gradient of the stock function and of ours; the logits reach far beyond exp's range."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 7, VOCAB, generator=generator) * 300).to(dtype)
    labels = torch.randint(VOCAB, (2, 7), generator=generator)
    labels[0, 3] = labels[1, :2] = -100
    full = logits.clone().requires_grad_()
    width = -(-VOCAB // world_size)
    padded = F.pad(logits, (0, world_size * width - VOCAB), value=1e4)
    local = padded.split(width, dim=-1)[rank].to(local_device()).requires_grad_()
    kept = local.detach().clone()
    loss = VocabParallelCausalLMLoss(ForCausalLMLoss, RankGroup(dist.group.WORLD))
    mine = loss(logits=local, labels=labels.to(local_device()), vocab_size=VOCAB, **arguments)
    theirs = ForCausalLMLoss(logits=full, labels=labels, vocab_size=VOCAB, **arguments)
    (mine * 3).backward()
    (theirs * 3).backward()
    assert torch.equal(local, kept) and local.grad.dtype == dtype
    assert mine.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = F.pad(full.grad, (0, world_size * width - VOCAB)).split(width, dim=-1)[rank]
    return mine.detach().cpu(), theirs.detach(), local.grad.cpu(), expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(num_items_in_batch=5),
        dict(num_items_in_batch=torch.tensor(7)),
        dict(shift_labels=torch.tensor([[1, 2, 3, -100, 5, 6, 11], [0, 7, 7, 7, -100, 1, 2]])),
        dict(ignore_index=3),
    ],
    ids=["mean", "number of items", "tensor of items", "shifted labels", "another index"],
)
def test_loss_and_gradient_equal_those_of_the_stock_function(arguments, dtype, device):
    if arguments.get("ignore_index") == 3:
        arguments = {**arguments, "shift_labels": torch.tensor([[1, 2, 3, 3, 5, 6, 11], [0, 7, 7, 7, 4, 1, 2]])}
    for mine, theirs, grad, expected in run_ranks(both, 2, dtype, **arguments, device=device, environment=FLOAT64):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, expected, rtol=1e-5 if dtype != torch.bfloat16 else 1e-2, atol=1e-6)


def nothing_to_learn(rank, world_size):
    loss = VocabParallelCausalLMLoss(ForCausalLMLoss, RankGroup(dist.group.WORLD))
    logits = torch.randn(1, 3, -(-VOCAB // world_size), requires_grad=True)
    labels = torch.full((1, 3), -100)
    assert loss(logits, labels, VOCAB).isnan()
    loss(logits, labels, VOCAB, num_items_in_batch=4).backward()
    assert not logits.grad.any()
    with pytest.raises(RuntimeError, match="inside the vocabulary of 13"):
        loss(logits, torch.tensor([[1, VOCAB, 2]]), VOCAB)
    full = torch.randn(1, 3, VOCAB)
    labels = torch.tensor([[1, 2, 3]])
    assert torch.equal(loss(full, labels, VOCAB), ForCausalLMLoss(full, labels, VOCAB))


def test_labels_out_of_range_raise_on_all_ranks_and_full_logits_go_to_the_stock_function():
    run_ranks(nothing_to_learn, 2, device="cpu")


def lean(rank, world_size):
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(2000, (64,))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        losses = vocab_parallel_cross_entropy(logits, target, RankGroup(dist.group.WORLD), 2000)
    large = [tensor for tensor in saved if tensor.numel() > 1000]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in large] == [((64, 1000), torch.float32)]
    losses = vocab_parallel_cross_entropy(logits, target, RankGroup(dist.group.WORLD), 2000)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_only_the_local_softmax_is_kept_for_the_backward_pass():
    run_ranks(lean, 2, device="cpu")
