"""Cross-entropy of logits that are cut along the vocabulary: the full logits never exist on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from optimum_trn.parallel.deferred_logits import DeferredLogits
from optimum_trn.parallel.mesh import RankGroup

TOKENS, BYTES = 256, 16 * 2**20
"""Of the logits that exist at a time when the head is part of the loss: so many tokens, or more while they take fewer
bytes.  The gradient of the weight is read and written once for each chunk, which a product of fewer tokens would feel;
more bytes would leave the cache."""


class _Target(NamedTuple):
    """Which of a rank's logits is the one of the label: its place among them, unless it is `elsewhere` or ignored."""

    place: Tensor
    elsewhere: Tensor
    ignored: Tensor

    @staticmethod
    def of(target: Tensor, local_size: int, ignore_index: int, group: RankGroup, vocab_size: int) -> _Target:
        ignored = target == ignore_index
        torch._assert_async(
            (ignored | ((target >= 0) & (target < vocab_size))).all(),
            f"a label is neither {ignore_index} nor inside the vocabulary of {vocab_size}",
        )
        index = target - group.rank * local_size
        elsewhere = ignored | (index < 0) | (index >= local_size)
        return _Target(index.masked_fill(elsewhere, 0), elsewhere, ignored)

    def chunk(self, start: int, length: int) -> _Target:
        return _Target(*(tensor.narrow(0, start, length) for tensor in self))

    def losses(
        self, logits: Tensor, group: RankGroup, vocab_size: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each token, and the local softmax, both float32 (float64 for float64 logits); it may be `out`."""
        local_size = logits.shape[-1]
        real_size = min(max(vocab_size - group.rank * local_size, 0), local_size)
        real = logits[..., :real_size]
        maximum = real.amax(dim=-1) if real_size else logits.new_full(logits.shape[:-1], -torch.inf)
        maximum = maximum if maximum.dtype == torch.float64 else maximum.float()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.process_group)
        # Type promotion makes the float32 copy and the subtraction one operation and one buffer.
        softmax = torch.sub(logits, maximum.unsqueeze(-1), out=out)
        target_logit = softmax.gather(-1, self.place.unsqueeze(-1)).squeeze(-1).masked_fill(self.elsewhere, 0)
        softmax.exp_()
        if real_size < local_size:
            softmax[..., real_size:] = 0
        sums = torch.stack((softmax.sum(dim=-1), target_logit))
        dist.all_reduce(sums, group=group.process_group)
        exponential_sum, target_logit = sums
        softmax.div_(exponential_sum.unsqueeze(-1))
        return (exponential_sum.log() - target_logit).masked_fill_(self.ignored, 0), softmax

    def gradient_(self, softmax: Tensor, scale: Tensor | None = None) -> Tensor:
        """The gradient of the logits, in place of the softmax, for one of the losses of `scale` (ones if not given)."""
        if scale is None:
            softmax.masked_fill_(self.ignored.unsqueeze(-1), 0)
            minus_one = self.elsewhere.to(softmax.dtype).sub_(1).unsqueeze(-1)
            return softmax.scatter_add_(-1, self.place.unsqueeze(-1), minus_one)
        scale = scale.masked_fill(self.ignored, 0).unsqueeze(-1)
        minus_scale = -scale.masked_fill(self.elsewhere.unsqueeze(-1), 0)
        return softmax.mul_(scale).scatter_add_(-1, self.place.unsqueeze(-1), minus_scale)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss; the one buffer it keeps is the local softmax, in float32 (float64 for float64 logits)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, group: RankGroup, vocab_size: int
    ) -> Tensor:
        places = _Target.of(target, logits.shape[-1], ignore_index, group, vocab_size)
        losses, softmax = places.losses(logits, group, vocab_size)
        ctx.save_for_backward(softmax, *places)
        ctx.logits_dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, *places = ctx.saved_tensors
        # In place, since this is the largest buffer of the step: a second backward through it, which only
        # retain_graph=True allows, raises autograd's error about a modified tensor.
        return _Target(*places).gradient_(softmax, grads[0]).to(ctx.logits_dtype), None, None, None, None


class _HeadLoss(torch.autograd.Function):
    """The sum of the losses of hidden states (tokens, features), whose logits exist for a chunk of tokens at a time.

    The gradients are computed in the forward pass, while a chunk's logits are there, and scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        group: RankGroup,
        vocab_size: int,
        needs_gradients: bool,
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        places = _Target.of(target, weight.shape[0], ignore_index, group, vocab_size)
        wanted = [needs and needs_gradients for needs in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Sums over chunks: rounding them to bfloat16 every time would lose what one product keeps.
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        total = hidden.new_zeros((), dtype=wide)
        chunk = max(TOKENS, BYTES // (weight.shape[0] * wide.itemsize))
        for start in range(0, len(hidden), chunk):
            part = hidden.narrow(0, start, min(chunk, len(hidden) - start))
            own = places.chunk(start, len(part))
            logits = F.linear(part, weight, bias)
            losses, softmax = own.losses(logits, group, vocab_size, logits if logits.dtype == wide else None)
            total += losses.sum()
            if not any(wanted):
                continue
            grad = own.gradient_(softmax)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden.narrow(0, start, len(part)))
            if wanted[1] and grad_weight is None:
                grad_weight = (grad.t() @ part).to(wide)
            elif grad_weight is not None and hidden.dtype == wide:
                grad_weight.addmm_(grad.t(), part)
            elif grad_weight is not None:
                grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as above.
        scaled = [
            None if grad is None else grad.mul_(grads[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


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


def head_loss(
    logits: DeferredLogits, target: Tensor, group: RankGroup, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """The sum of `vocab_parallel_cross_entropy` over logits that a head has not computed yet, in chunks of tokens."""
    hidden, weight, bias = logits.hidden.flatten(0, -2), logits.weight, logits.bias
    dtype = logits.dtype  # what autocast makes of it
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        total: Tensor = _HeadLoss.apply(
            hidden, weight, bias, target, ignore_index, group, vocab_size, torch.is_grad_enabled()
        )
    return total


class VocabParallelCausalLMLoss:
    """The loss function of a causal language model that takes local logits, and leaves full ones to the stock function.

    The arguments, the shift of the labels and the division are those of transformers' `ForCausalLMLoss`.
    """

    takes_local_logits = True
    needs_logits: bool
    """Whether something else looks at the logits, which are gathered then; where it is not set, in evaluation only."""

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
        if isinstance(logits, DeferredLogits):
            total = head_loss(logits, target, self.group, vocab_size, ignore_index)
        else:
            losses = vocab_parallel_cross_entropy(logits.flatten(0, -2), target, self.group, vocab_size, ignore_index)
            total = losses.sum()
        if num_items_in_batch is None:
            return total / (target != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

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
