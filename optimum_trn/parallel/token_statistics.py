"""What preference and chat training reads off the logits of each token, where these are cut along the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from optimum_trn.parallel.loss import vocab_parallel_cross_entropy
from optimum_trn.parallel.mesh import RankGroup


@dataclass(frozen=True)
class TokenStatistics:
    """Of each token, (num_tokens), zero where its target is ignored; only `log_probs` has a gradient."""

    log_probs: Tensor
    """Log-probability of the target."""
    entropy: Tensor
    """Of the distribution over the vocabulary, in nats."""
    log_sum_sq_probs: Tensor
    """log(sum of squared probabilities)."""
    mean_logits: Tensor
    """Over the vocabulary."""
    is_top1: Tensor
    """Whether the target is the first of the most likely tokens; bool."""


def token_statistics(
    logits: Tensor, target: Tensor, vocab_size: int, group: RankGroup | None = None, ignore_index: int = -100
) -> TokenStatistics:
    """Statistics of logits (num_tokens, vocab_size), or of this rank's range of them if they are cut over `group`.

    In float32 (float64 for float64 logits).  Two collectives beside those of `vocab_parallel_cross_entropy`, each of a
    few numbers a token: the full logits never exist on one rank.
    """
    if group is None:
        exact = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(exact, target, ignore_index=ignore_index, reduction="none")
    else:
        losses = vocab_parallel_cross_entropy(logits, target, group, vocab_size, ignore_index)
    with torch.no_grad():
        ignored = target == ignore_index
        start = 0 if group is None else group.rank * logits.shape[-1]
        real = logits[..., : min(max(vocab_size - start, 0), logits.shape[-1])]
        real = real if real.dtype == torch.float64 else real.float()
        if real.shape[-1]:
            maximum, likeliest = real.max(-1)
        else:
            maximum, likeliest = real.new_full(real.shape[:-1], -torch.inf), torch.zeros_like(target)
        own_maximum = maximum.clone()
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.process_group)
        elsewhere = ignored | (target < start) | (target >= start + real.shape[-1])
        index = (target - start).masked_fill(elsewhere, 0).unsqueeze(-1)
        own = real.gather(-1, index).squeeze(-1) if real.shape[-1] else torch.zeros_like(maximum)
        earlier = (own_maximum == maximum) & (likeliest + start < target)  # a tie goes to the first, as in argmax
        shifted = real - maximum.unsqueeze(-1)
        exponentials = shifted.exp()
        sums = torch.stack(
            (
                exponentials.sum(-1),
                (exponentials * shifted).sum(-1),
                exponentials.square().sum(-1),
                real.sum(-1),
                own.masked_fill(elsewhere, 0),
                earlier.to(real.dtype),
            )
        )
        if group is not None:
            dist.all_reduce(sums, group=group.process_group)
        total, weighted, squares, logit_sum, target_logit, earlier_ranks = sums
        entropy = total.log() - weighted / total
        log_sum_sq_probs = squares.log() - 2 * total.log()
    return TokenStatistics(
        log_probs=-losses,
        entropy=entropy.masked_fill(ignored, 0),
        log_sum_sq_probs=log_sum_sq_probs.masked_fill(ignored, 0),
        mean_logits=(logit_sum / vocab_size).masked_fill(ignored, 0),
        is_top1=((target_logit >= maximum) & (earlier_ranks == 0)).masked_fill(ignored, False),
    )
