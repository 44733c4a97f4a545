"""Sequence parallelism: between sharded blocks, activations are cut along the sequence instead of being replicated.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2): an all-gather where a block enters and a reduce-scatter where
it leaves move as many bytes as the all-reduce that they replace, and what lies between them is kept once for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import copy_to_group
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.regather import Gathered


class SequenceLength:
    """The length of the sequences that the model is computing with: shards alone do not tell how much is padding."""

    value: int = 0


class SequenceGroup(RankGroup):
    """A group whose ranks hold runs of the sequence, dimension 1, between the sharded blocks.

    Runs are equally long: zeros follow the sequence if the group's size does not divide it, and are cut off again
    before a block computes.  Tensors of two dimensions are tokens and features, runs of tokens that no attention will
    see.
    """

    def __init__(self, process_group: dist.ProcessGroup, length: SequenceLength) -> None:
        super().__init__(process_group)
        self.length = length

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        if id(self.length) not in memo:
            memo[id(self.length)] = SequenceLength()
            memo[id(self.length)].value = self.length.value
        return SequenceGroup(self.process_group, memo[id(self.length)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of, (RankGroup(self.process_group), self.length)

    def enter(self, tensor: Tensor) -> Tensor:
        """All-gather forward, reduce-scatter of the partial gradients backward.

        Linear layers that read the result keep this rank's run of it for the backward pass (see regather.py).
        """
        whole: Tensor = _Gather.apply(tensor, self, True)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            Gathered(tensor, self._as_now().start_gather).mark(whole)
        return whole

    def leave(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter of the partial sums forward, all-gather backward."""
        result: Tensor = _ReduceScatter.apply(tensor, self)
        return result

    def parameter(self, parameter: Tensor) -> Tensor:
        """A whole parameter that meets this rank's run of the sequence: its gradient is summed."""
        return copy_to_group(parameter, self.process_group)

    def scatter(self, tensor: Tensor) -> Tensor:
        """A replicated tensor is cut: the own run forward, all-gather backward."""
        result: Tensor = _Scatter.apply(tensor, self)
        return result

    def gather(self, tensor: Tensor) -> Tensor:
        """Runs become a replicated tensor, with which all ranks do the same: the own run of the gradient backward."""
        result: Tensor = _Gather.apply(tensor, self, False)
        return result

    def gathered(self, local: Tensor) -> Tensor:
        """All runs together, without the padding after them."""
        return self.start_gather(local)()

    def start_gather(self, local: Tensor) -> Callable[[], Tensor]:
        """Have all runs under way to here; what it returns waits for them, and puts them together."""
        dim = _sequence_dim(local)
        if dim == 1 and local.shape[1] != -(-self.length.value // self.size):
            raise PlanError(
                f"Sequences of {self.length.value} tokens are cut into runs of {-(-self.length.value // self.size)} on "
                f"{self.size} ranks, but this rank has a run of {local.shape[1]}: with recomputation, run the backward "
                "pass of one batch before the forward pass of a batch of another length."
            )
        local, length = local.contiguous(), self.length.value
        runs = [torch.empty_like(local) for _ in range(self.size)]
        work: Any = dist.all_gather(runs, local, group=self.process_group, async_op=True)

        def together() -> Tensor:
            work.wait()
            whole = torch.cat(runs, dim=dim)
            return whole if dim == 0 else whole[:, :length].contiguous()  # stock forwards take views

        return together

    def _as_now(self) -> SequenceGroup:
        """The group with the length that it has now, whatever the model computes with later."""
        length = SequenceLength()
        length.value = self.length.value
        return SequenceGroup(self.process_group, length)

    def own_run(self, whole: Tensor) -> Tensor:
        """This rank's run, padding included."""
        return self._runs(whole)[self.rank].contiguous()

    def summed_run(self, partial: Tensor) -> Tensor:
        """This rank's run of the sum over the ranks."""
        runs = torch.stack(self._runs(partial))
        total = torch.empty_like(runs[0])
        dist.reduce_scatter_single(total, runs.flatten(0, 1), group=self.process_group)
        return total

    def _runs(self, whole: Tensor) -> list[Tensor]:
        dim = _sequence_dim(whole)
        run = -(-whole.shape[dim] // self.size)
        missing = run * self.size - whole.shape[dim]
        if missing:
            whole = torch.cat([whole, whole.new_zeros(*whole.shape[:dim], missing, *whole.shape[dim + 1 :])], dim=dim)
        return list(whole.split(run, dim=dim))


def _group_of(group: RankGroup, length: SequenceLength) -> SequenceGroup:
    return SequenceGroup(group.process_group, length)


def _sequence_dim(tensor: Tensor) -> int:
    return 0 if tensor.dim() == 2 else 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup, partial_gradients: bool) -> Tensor:
        ctx.group, ctx.partial_gradients = group, partial_gradients
        return group.gathered(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group: SequenceGroup = ctx.group
        return (group.summed_run if ctx.partial_gradients else group.own_run)(grads[0]), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.length = group, tensor.shape[_sequence_dim(tensor)]
        return group.summed_run(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _whole(ctx, grads[0]), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.length = group, tensor.shape[_sequence_dim(tensor)]
        return group.own_run(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _whole(ctx, grads[0]), None


def _whole(ctx: Any, local: Tensor) -> Tensor:
    # Of the length that the forward pass had, whatever the model computes with by now.
    length = SequenceLength()
    length.value = ctx.length
    return SequenceGroup(ctx.group.process_group, length).gathered(local)
