"""Input embedding and output head, cut along the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optimum_trn.parallel.collectives import copy_to_group, gather_from_group, reduce_from_group
from optimum_trn.parallel.deferred_logits import DeferredLogits
from optimum_trn.parallel.linear import ColumnParallelLinear
from optimum_trn.parallel.mesh import RankGroup


class VocabParallelEmbedding(nn.Embedding):
    """Each rank looks up the tokens of its own vocabulary range; the others contribute zeros to the sum.

    `weight` (own tokens, embedding_dim) is local: its range of the vocabulary of `num_embeddings` starts at
    `vocab_start` and may reach beyond the vocabulary, with rows that no token looks up.  A token outside the vocabulary
    raises on all ranks, as it does in the stock layer.
    """

    group: RankGroup
    vocab_start: int

    def forward(self, input: Tensor) -> Tensor:
        # An assertion without a synchronisation on the host, and one that all ranks fail together.
        torch._assert_async(
            ((input >= 0) & (input < self.num_embeddings)).all(),
            f"a token id is outside the vocabulary of {self.num_embeddings}",
        )
        index = input - self.vocab_start
        own_tokens = self.weight.shape[0]
        elsewhere = (index < 0) | (index >= own_tokens)
        padding = None if self.padding_idx is None else self.padding_idx - self.vocab_start
        padding = padding if padding is not None and 0 <= padding < own_tokens else None
        output = F.embedding(index.masked_fill(elsewhere, 0), self.weight, padding)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from_group(output, self.group.process_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, vocabulary range of {self.group}"


class ParallelLMHead(ColumnParallelLinear):
    """The output head: each rank computes the logits of its own vocabulary range.

    They are gathered to (..., out_features), unless `gathers_output` is off while a vocabulary-parallel loss takes
    them, and computes them itself: then the range of the last ranks may reach beyond the vocabulary, with logits that
    mean nothing.
    """

    gathers_output: bool

    def forward(self, input: Tensor) -> Tensor:
        input = copy_to_group(input, self.group.process_group)
        if not self.gathers_output and not torch.compiler.is_compiling():
            return DeferredLogits.of(input, self.weight, self.bias)
        return self.output(F.linear(input, self.weight, self.bias))

    def output(self, logits: Tensor) -> Tensor:
        """What the head gives of this rank's logits, (..., own tokens)."""
        if not self.gathers_output:
            return logits
        logits = gather_from_group(logits, self.group.process_group, dim=-1)
        return logits if logits.shape[-1] == self.out_features else logits[..., : self.out_features]
