"""Context parallelism: every rank holds two chunks of each sequence, one from its head and one from its tail.

A causal model gives late tokens more to attend to than early ones.  With the sequence in twice as many chunks as there
are ranks, the chunk from the head and the one from the tail that a rank holds cost the same in all (Brandon et al.
2023, arXiv:2311.09431, stripe the tokens to the same end; Llama 3, arXiv:2407.21783, section 3.3.2, takes chunks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.parallel.mesh import RankGroup

CHUNKS_PER_RANK = 2


@dataclass(frozen=True)
class ContextLayout:
    """Where the tokens of the sequences of one batch are.

    `length` is that of the whole sequences; what fills them up to equal chunks comes last.  `real` (batch, padded
    length) is False for tokens that nothing may attend to, and `sequences`, of the same shape, numbers the sequences
    that are packed into one row; None where all tokens are real, and where no row is packed.

    Every rank goes on with the same whole tensors before tokens are cut and after they are gathered, and between them
    with its own.  Gradients of parameters are to be averaged over the ranks, as they are over data-parallel ones: so
    what goes back into the part with own tokens is multiplied by their number.
    """

    group: RankGroup
    length: int
    real: Tensor | None = None
    sequences: Tensor | None = None

    @property
    def chunk(self) -> int:
        """The number of tokens of a chunk."""
        return -(-self.length // (CHUNKS_PER_RANK * self.group.size))

    @property
    def padded_length(self) -> int:
        """The length of the whole sequences with what fills them up."""
        return CHUNKS_PER_RANK * self.group.size * self.chunk

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The chunks that a rank holds, in this order."""
        return rank, CHUNKS_PER_RANK * self.group.size - 1 - rank

    def positions(self, chunk: int, device: torch.device) -> Tensor:
        """The places of a chunk's tokens in their sequence."""
        return torch.arange(chunk * self.chunk, (chunk + 1) * self.chunk, device=device)

    def padded(self, whole: Tensor, fill: float, dim: int = 1) -> Tensor:
        """A whole tensor, filled up along its dimension of tokens."""
        missing = self.padded_length - whole.shape[dim]
        if not missing:
            return whole
        filling = whole.new_full((*whole.shape[:dim], missing, *whole.shape[dim + 1 :]), fill)
        return torch.cat([whole, filling], dim=dim)

    def cut(self, whole: Tensor, fill: float = 0, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that all ranks hold."""
        chunks = self.padded(whole, fill, dim).split(self.chunk, dim=dim)
        return torch.cat([chunks[chunk] for chunk in self.chunks_of(self.group.rank)], dim=dim)

    def gather(self, local: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor on every rank, without what filled it up."""
        result: Tensor = _Gather.apply(local, self, dim)
        return result

    def total(self, partial: Tensor) -> Tensor:
        """The sum of what each rank's tokens give, on every rank."""
        result: Tensor = _Total.apply(partial, self.group)
        return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: ContextLayout, dim: int) -> Tensor:
        ctx.layout, ctx.dim = layout, dim
        local = local.contiguous()
        ranks = [torch.empty_like(local) for _ in range(layout.group.size)]
        dist.all_gather(ranks, local, group=layout.group.process_group)
        chunks: dict[int, Tensor] = {}
        for rank, held in enumerate(ranks):
            chunks.update(zip(layout.chunks_of(rank), held.split(layout.chunk, dim=dim), strict=True))
        whole = torch.cat([chunks[chunk] for chunk in range(len(chunks))], dim=dim)
        return whole.narrow(dim, 0, layout.length).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.cut(grads[0], dim=ctx.dim) * ctx.layout.group.size, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: RankGroup) -> Tensor:
        ctx.size = group.size
        total = partial.clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None
