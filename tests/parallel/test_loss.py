"""The vocabulary-parallel cross-entropy is the stock one, without the full logits."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from optimum_trn.parallel import RankGroup
from optimum_trn.parallel.deferred_logits import DeferredLogits
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


def deferred(rank, world_size, dtype):
    """Losses and gradients of a head whose logits exist for 3 tokens at a time, and of the whole stock head."""
    with patch.multiple("optimum_trn.parallel.loss", TOKENS=3, BYTES=0):
        return in_chunks(rank, world_size, dtype)


def in_chunks(rank, world_size, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 7, 5), (VOCAB, 5), (VOCAB,)))
    labels = torch.randint(VOCAB, (2, 7), generator=generator)
    labels[0, 3] = labels[1, :2] = -100
    width = -(-VOCAB // world_size)
    start = rank * width
    missing = max(0, start + width - VOCAB)
    own = [
        hidden,
        F.pad(weight[start : start + width], (0, 0, 0, missing), value=9.0),
        F.pad(bias[start : start + width], (0, missing), value=9.0),
    ]
    own = [tensor.to(local_device(), dtype).requires_grad_() for tensor in own]
    whole = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    loss = VocabParallelCausalLMLoss(ForCausalLMLoss, RankGroup(dist.group.WORLD))
    mine = loss(logits=DeferredLogits.of(*own), labels=labels.to(local_device()), vocab_size=VOCAB)
    # Not the stock function, which computes in float32.
    theirs = F.cross_entropy(F.linear(*whole).to(mine.dtype)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    (mine * 3).backward()
    (theirs * 3).backward()
    partial = own[0].grad.clone()
    dist.all_reduce(partial)
    expected = [F.pad(t.grad[start : start + width], (0,) * (2 * t.dim() - 1) + (missing,)) for t in whole[1:]]
    with torch.no_grad():
        evaluated = loss(logits=DeferredLogits.of(*own), labels=labels.to(local_device()), vocab_size=VOCAB)
    pairs = [(mine.detach(), theirs.detach()), (evaluated, theirs.detach()), (partial, whole[0].grad)]
    return [(a.cpu(), b) for a, b in (*pairs, *zip((t.grad for t in own[1:]), expected, strict=True))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_head_with_the_loss_has_the_gradients_of_the_stock_head_though_only_a_chunk_of_logits_exists(dtype):
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=2e-2, atol=2e-2)
    for pairs in run_ranks(deferred, 2, dtype, device="cpu"):
        for mine, theirs in pairs:
            torch.testing.assert_close(mine.to(theirs.dtype), theirs, **tolerance)


def test_whatever_else_looks_at_deferred_logits_gets_them_whole_with_their_gradient():
    hidden, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    logits = DeferredLogits.of(hidden, weight, None)
    assert logits.shape == (2, 3, 4) and logits.dtype == torch.float32 and logits._product is None
    scaled = logits / 2
    assert type(scaled) is torch.Tensor and torch.equal(scaled, F.linear(hidden, weight) / 2)
    torch.cat([logits, logits.float()])[..., 1].sum().backward()
    expected = torch.zeros(4, 5)
    expected[1] = 2 * hidden.detach().sum((0, 1))
    torch.testing.assert_close(weight.grad, expected)
    assert logits.requires_grad and logits.untyped_storage().nbytes() == logits.numel() * 4
