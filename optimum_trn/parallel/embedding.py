"""Input embedding and output head, cut along the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optimum_trn.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group
from optimum_trn.parallel.linear import ColumnParallelLinear
from optimum_trn.parallel.mesh import RankGroup


class VocabParallelEmbedding(nn.Embedding):
    """Each rank looks up the tokens of its own vocabulary range; the others contribute zeros to the sum.

    `num_embeddings`, `padding_idx` and `weight` (num_embeddings, embedding_dim) are local; the range starts at
    `vocab_start` of `vocab_size`, and may reach beyond it with rows that no token looks up.  A token outside the
    vocabulary raises on all ranks, as it does in the stock layer.
    """

    group: RankGroup
    vocab_size: int
    vocab_start: int
    stock_padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        # An assertion without a synchronisation on the host, and one that all ranks fail together.
        torch._assert_async(
            ((input >= 0) & (input < self.vocab_size)).all(),
            f"a token id is outside the vocabulary of {self.vocab_size}",
        )
        index = input - self.vocab_start
        elsewhere = (index < 0) | (index >= self.num_embeddings)
        output = F.embedding(index.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from_group(output, self.group.process_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, vocabulary range of {self.group}"


class ParallelLMHead(ColumnParallelLinear):
    """The output head: each rank computes the logits of its own vocabulary range.

    They are gathered to (..., vocab_size), unless `gathers_output` is off while a vocabulary-parallel loss takes them:
    then the range of the last ranks may reach beyond the vocabulary, with logits that mean nothing.
    """

    gathers_output: bool
    vocab_size: int

    def forward(self, input: Tensor) -> Tensor:
        logits = F.linear(copy_to_group(input, self.group.process_group), self.weight, self.bias)
        if not self.gathers_output:
            return logits
        logits = gather_from_group(logits, self.group.process_group, dim=-1)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]
