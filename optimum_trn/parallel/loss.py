"""Cross-entropy of logits that are cut along the vocabulary: the full logits never exist on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from optimum_trn.parallel.mesh import RankGroup


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss; the one buffer it keeps is the local softmax, in float32 (float64 for float64 logits)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, group: RankGroup, vocab_size: int
    ) -> Tensor:
        local_size = logits.shape[-1]
        real_size = min(max(vocab_size - group.rank * local_size, 0), local_size)
        real = logits[..., :real_size]
        maximum = real.amax(dim=-1) if real_size else logits.new_full(logits.shape[:-1], -torch.inf)
        maximum = maximum if maximum.dtype == torch.float64 else maximum.float()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.process_group)
        # Type promotion makes the float32 copy and the subtraction one operation and one buffer.
        softmax = torch.sub(logits, maximum.unsqueeze(-1))

        ignored = target == ignore_index
        torch._assert_async(
            (ignored | ((target >= 0) & (target < vocab_size))).all(),
            f"a label is neither {ignore_index} nor inside the vocabulary of {vocab_size}",
        )
        index = target - group.rank * local_size
        elsewhere = ignored | (index < 0) | (index >= local_size)
        index = index.masked_fill(elsewhere, 0)
        target_logit = softmax.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)

        softmax.exp_()
        if real_size < local_size:
            softmax[..., real_size:] = 0
        sums = torch.stack((softmax.sum(dim=-1), target_logit))
        dist.all_reduce(sums, group=group.process_group)
        exponential_sum, target_logit = sums
        softmax.div_(exponential_sum.unsqueeze(-1))

        ctx.save_for_backward(softmax, index, elsewhere, ignored)
        ctx.logits_dtype = logits.dtype
        return (exponential_sum.log() - target_logit).masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, index, elsewhere, ignored = ctx.saved_tensors
        scale = grads[0].masked_fill(ignored, 0).unsqueeze(-1)
        # In place, since this is the largest buffer of the step: a second backward through it, which only
        # retain_graph=True allows, raises autograd's error about a modified tensor.
        grad = softmax.mul_(scale)
        grad.scatter_add_(-1, index.unsqueeze(-1), -scale.masked_fill(elsewhere.unsqueeze(-1), 0))
        return grad.to(ctx.logits_dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: RankGroup, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """The loss of each token, in float32 (float64 for float64 logits), zero where the target is `ignore_index`.

    `logits` (num_tokens, vocab_size / group.size, rounded up) are those of this rank's vocabulary range; what reaches
    beyond `vocab_size` takes no part.  `target` (num_tokens) holds global token ids.  One collective for the maximum,
    one for the sum of exponentials and the target's logit (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, target, ignore_index, group, vocab_size)
    return loss


class VocabParallelCausalLMLoss:
    """The loss function of a causal language model that takes local logits, and leaves full ones to the stock function.

    The arguments, the shift of the labels and the division are those of transformers' `ForCausalLMLoss`.
    """

    takes_local_logits = True

    def __init__(self, stock: Callable[..., Tensor], group: RankGroup) -> None:
        self.stock = stock
        self.group = group

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if logits.shape[-1] == vocab_size:
            return self.stock(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = self.aligned(labels, ignore_index)
        target = shift_labels.reshape(-1).to(logits.device)
        losses = vocab_parallel_cross_entropy(logits.flatten(0, -2), target, self.group, vocab_size, ignore_index)
        if num_items_in_batch is None:
            return losses.sum() / (target != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        return losses.sum() / num_items_in_batch

    @staticmethod
    def aligned(labels: Tensor, ignore_index: int) -> Tensor:
        """The label of each position's logits: the next token."""
        return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class VocabParallelMaskedLMLoss(VocabParallelCausalLMLoss):
    """The same for a masked language model, whose labels stand where their tokens are, as in `ForMaskedLMLoss`."""

    @staticmethod
    def aligned(labels: Tensor, ignore_index: int) -> Tensor:
        """The label of each position's logits: its own token."""
        return labels
