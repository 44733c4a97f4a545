"""Ring attention: keys and values go round the ranks of a context-parallel group, queries stay where they are.

Liu et al. 2023 (arXiv:2310.01889); partial results are merged by their log-sum-exp as in FlashAttention-2 (Dao 2023,
arXiv:2307.08691, section 3.1), and the backward pass recomputes the scores from it, so that no rank ever keeps more
than the scores of one pair of chunks.  torch's own ring (torch.distributed.tensor.experimental) takes no masks, no
length that the ranks do not divide, and merges in float32; it drives fused kernels of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.parallel.context import ContextLayout
from optimum_trn.parallel.mesh import RankGroup

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query attends to a key, from the indices of batch row, head, query and key (transformers.masking_utils)."""


@dataclass(frozen=True)
class RingMask:
    """Which tokens of the whole sequences attend to which, evaluated for one pair of chunks at a time.

    `rows` are those of the batch.  `function` sees places in the whole sequence; padding and packing are those of the
    layout.  `is_causal`, and a `window` beyond which nothing is attended to, are what `function` says about all rows
    and heads alike: pairs of chunks that they hide are left out.
    """

    layout: ContextLayout
    rows: int
    function: MaskFunction
    is_causal: bool = False
    window: int | None = None

    def hides(self, queries: int, keys: int) -> bool:
        """Whether no query of a chunk attends to any key of another, whatever the batch."""
        distance = (abs(queries - keys) - 1) * self.layout.chunk + 1  # between the two tokens that are closest
        beyond = self.window is not None and queries != keys and distance > self.window
        return beyond or (self.is_causal and keys > queries)

    def of(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask of two chunks, (batch or 1, 1, queries, keys); None if all queries attend to all keys."""
        layout = self.layout
        everywhere = layout.real is None and layout.sequences is None
        if everywhere and self.is_causal and self.window is None and keys < queries:
            return None
        places = layout.positions(queries, device), layout.positions(keys, device)
        row = torch.arange(self.rows, device=device)[:, None, None, None]
        mask = self.function(
            row, torch.zeros_like(row[:1]), places[0][None, None, :, None], places[1][None, None, None]
        )
        if layout.real is not None:
            mask = mask & layout.real[:, places[1]][:, None, None, :]
        if layout.sequences is not None:
            own, other = layout.sequences[:, places[0]], layout.sequences[:, places[1]]
            mask = mask & (own[:, None, :, None] == other[:, None, None, :])
        return mask


@dataclass(frozen=True)
class Scoring:
    """How scores become weights: their `scale`, a `softcap` (tanh), and the probability that `dropout` drops one."""

    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """The scores of two chunks, (batch, groups, queries of a group, queries, keys), before any mask."""
        scores = torch.matmul(query * self.scale, key.unsqueeze(2).transpose(-1, -2))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def slope(self, scores: Tensor) -> Tensor | float:
        """The derivative of the scores by what they were before the cap."""
        return self.scale if self.softcap is None else self.scale * (1 - (scores / self.softcap).square())

    def kept(self, weights: Tensor, queries: int, keys: int) -> Tensor | float:
        """What the weights of two chunks are multiplied by, the same whenever it is asked."""
        if not self.dropout:
            return 1.0
        generator = torch.Generator(device=weights.device).manual_seed(self.seed + (queries << 16) + keys)
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        return (drawn >= self.dropout).to(weights.dtype) / (1 - self.dropout)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: RingMask, scoring: Scoring, sinks: Tensor | None = None
) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks: (batch, heads, local tokens, value width).

    `query` (batch, heads, local tokens, width), `key` and `value` (batch, key heads, local tokens, widths) hold the
    chunks of `mask.layout`; heads are a multiple of key heads.  `sinks` (heads) are scores that draw weight off and
    give nothing.  A query that attends to nothing gives zeros.
    """
    key_heads = key.shape[1]
    grouped = query.unflatten(1, (key_heads, query.shape[1] // key_heads))
    grouped_sinks = None if sinks is None else sinks.view(key_heads, -1)
    output: Tensor = _Ring.apply(grouped, key, value, grouped_sinks, mask, scoring)
    return output.flatten(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: RingMask, scoring: Scoring
    ) -> Tensor:
        chunk = mask.layout.chunk
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
        log_sum = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
        for source, (held_key, held_value) in _round_the_ring(mask.layout.group, key, value):
            for at, rows, columns, visible in _pairs(mask, source, query.device):
                scores = scoring.scores(query.narrow(3, rows, chunk), held_key.narrow(2, columns, chunk))
                scores = _masked(scores, visible)
                before = log_sum.narrow(3, rows, chunk)
                after = torch.logaddexp(before, scores.logsumexp(dim=-1))
                finite = _finite(after)
                weights = (scores - finite.unsqueeze(-1)).exp_()
                weights = weights * scoring.kept(weights, *at)
                part = output.narrow(3, rows, chunk)
                part.mul_((before - finite).exp_().unsqueeze(-1))
                part.add_(torch.matmul(weights.to(value.dtype), held_value.narrow(2, columns, chunk).unsqueeze(2)))
                before.copy_(after)
        if sinks is not None:
            with_sinks = torch.logaddexp(log_sum, sinks[..., None].to(dtype))
            output.mul_((log_sum - with_sinks).exp_().unsqueeze(-1))
            log_sum = with_sinks
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.mask, ctx.scoring = mask, scoring
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        mask, scoring, grad = ctx.mask, ctx.scoring, grads[0]
        chunk, group = mask.layout.chunk, mask.layout.group
        dtype = log_sum.dtype
        finite = _finite(log_sum).unsqueeze(-1)
        inner = (grad.to(dtype) * output).sum(dim=-1, keepdim=True)
        grad_query = torch.zeros_like(query, dtype=dtype)
        # The gradients of keys and values follow them round the ring, and each rank adds its part.
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for source, (held_key, held_value) in _round_the_ring(group, key, value):
            if source != group.rank:
                grad_key, grad_value = _Passed(group, grad_key, grad_value).received()
            for at, rows, columns, visible in _pairs(mask, source, query.device):
                queries = query.narrow(3, rows, chunk)
                keys, values = held_key.narrow(2, columns, chunk), held_value.narrow(2, columns, chunk)
                rise = grad.narrow(3, rows, chunk)
                scores = scoring.scores(queries, keys)
                weights = (_masked(scores, visible) - finite.narrow(3, rows, chunk)).exp_()
                kept = scoring.kept(weights, *at)
                grad_value.narrow(2, columns, chunk).add_(
                    torch.matmul((weights * kept).to(rise.dtype).transpose(-1, -2), rise).sum(dim=2)
                )
                grad_weights = torch.matmul(rise, values.unsqueeze(2).transpose(-1, -2)) * kept
                grad_scores = weights * (grad_weights - inner.narrow(3, rows, chunk)) * scoring.slope(scores)
                grad_scores = grad_scores.to(query.dtype)
                grad_query.narrow(3, rows, chunk).add_(torch.matmul(grad_scores, keys.unsqueeze(2)))
                grad_key.narrow(2, columns, chunk).add_(torch.matmul(grad_scores.transpose(-1, -2), queries).sum(dim=2))
        grad_key, grad_value = _Passed(group, grad_key, grad_value).received()
        grad_sinks = None
        if sinks is not None:
            weights = (sinks[..., None].to(dtype) - log_sum).exp()
            grad_sinks = -(weights * inner.squeeze(-1)).sum(dim=(0, 3)).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None


def _pairs(
    mask: RingMask, source: int, device: torch.device
) -> Iterator[tuple[tuple[int, int], int, int, Tensor | None]]:
    """The pairs of chunks of this rank's queries and a source's keys that are to be computed.

    Each with where the two are in the local tensors, and its mask.
    """
    layout = mask.layout
    for row, queries in enumerate(layout.chunks_of(layout.group.rank)):
        for column, keys in enumerate(layout.chunks_of(source)):
            if not mask.hides(queries, keys):
                visible = mask.of(queries, keys, device)
                yield (queries, keys), row * layout.chunk, column * layout.chunk, visible


def _masked(scores: Tensor, visible: Tensor | None) -> Tensor:
    return scores if visible is None else scores.masked_fill(~visible.unsqueeze(1), -torch.inf)


def _finite(log_sum: Tensor) -> Tensor:
    """Zero in place of the infinity of a query that attends to nothing, whose weights are zero then, not nan."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0)


def _round_the_ring(group: RankGroup, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The tensors of every rank, this one's first, with whose they are; the next arrive while these are used."""
    for step in range(group.size):
        passed = _Passed(group, *tensors) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, tensors
        if passed is not None:
            tensors = passed.received()


class _Passed:
    """Tensors on their way to the next rank, as one message, and those of the rank before on their way to this one."""

    def __init__(self, group: RankGroup, *tensors: Tensor) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.arriving = torch.empty_like(sent)
        to, of = [0] * group.size, [0] * group.size
        to[(group.rank + 1) % group.size] = of[group.rank - 1] = sent.numel()
        self.sent = sent  # must live until it has left
        self.work = dist.all_to_all_single(self.arriving, sent, of, to, group=group.process_group, async_op=True)

    def received(self) -> tuple[Tensor, ...]:
        """The tensors of the rank before, of the same shapes."""
        self.work.wait()
        parts = self.arriving.split([shape.numel() for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
