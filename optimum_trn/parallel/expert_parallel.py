"""Expert parallelism: whole experts live on one rank of a group each, and tokens go to them and come back.

Lepikhin et al. 2020 (GShard, arXiv:2006.16668, section 3.2), without a capacity: every token reaches every expert that
its router chose, so that the sizes of the messages follow the routing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from optimum_trn.parallel.experts import ShardedExperts
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sequence import SequenceGroup, SequenceLength


class DistributedExperts(ShardedExperts):
    """The forward of one instance that holds a run of the experts of a mixture; the other ranks of `group` the others.

    Takes what the stock forward takes: hidden states (tokens, features), and for each token the experts that it goes to
    and their weights, (tokens, choices).  Ranks of the group have tokens of their own; those of `tensor_group` the same
    ones, of which each sends its share.  The weights stay where the tokens come from, and with them their gradient.
    """

    def __init__(self, module: nn.Module, group: RankGroup, tensor_group: RankGroup) -> None:
        super().__init__(module, group)
        self.tensor_group = tensor_group

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        size, num_tokens = self.tensor_group.size, len(hidden_states)
        if size == 1:
            return self._routed(hidden_states, top_k_index, top_k_weights)
        # Equal shares for the collectives; what fills the last ones up is sent to no expert.
        share = -(-num_tokens // size)
        tokens = SequenceGroup(self.tensor_group.process_group, SequenceLength())
        first = self.tensor_group.rank * share
        own = max(0, min(share, num_tokens - first))

        def mine(whole: Tensor) -> Tensor:
            return tokens.scatter(F.pad(whole, (0, 0, 0, share * size - num_tokens)))[:own]

        output = self._routed(mine(hidden_states), top_k_index[first : first + own], mine(top_k_weights))
        return tokens.gather(F.pad(output, (0, 0, 0, share - own)))[:num_tokens]

    def _routed(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ranks, experts = self.group.size, self._num_local_experts()
        choice = index.flatten()
        order = choice.argsort(stable=True)  # by expert, and so by the rank that holds it
        counts = torch.zeros(ranks * experts, dtype=torch.int64, device=choice.device)
        counts.scatter_add_(0, choice, torch.ones_like(choice))
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group.process_group)
        totals = torch.stack([counts.view(ranks, experts).sum(dim=1), arriving.view(ranks, experts).sum(dim=1)])
        sent, received = totals.tolist()  # a message has its size on the host
        rows = _Exchange.apply(hidden_states[order // index.shape[1]], sent, received, self.group)
        expert = torch.arange(experts, device=choice.device).repeat(ranks).repeat_interleave(arriving)
        rows = _Exchange.apply(self._computed(rows, expert), received, sent, self.group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        chosen = rows[back].view(*index.shape, -1)
        return (chosen * weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _num_local_experts(self) -> int:
        return len(next(iter(self.module.parameters())))

    def _computed(self, rows: Tensor, expert: Tensor) -> Tensor:
        """What this rank's experts make of the rows, unweighted, by the stock forward."""
        if not len(rows):
            # No forward would leave the experts without a gradient where one process has zeros, and the ranks that sent
            # nothing here without the collective of their backward pass.
            nothing = torch.stack([parameter.sum() * 0 for parameter in self.module.parameters()]).sum()
            return rows + nothing
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__["num_experts"] = self._num_local_experts()
        output: Tensor = twin.forward(rows, expert[:, None], rows.new_ones(len(rows), 1))
        return output


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, so many to each; their gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: RankGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: RankGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group.process_group)
    return arrived
