"""The pipeline engine: runs this rank's stages in the order of a schedule, forward and backward.

Of torch.distributed.pipelining it takes the split of a backward pass into that of the inputs and that of the weights.
Its stages are not used: they want micro-batches of equal shapes, hold a buffer for the activations of each of them
from the start, and keep the outputs of the last stage, logits and all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.schedules import STAGES_PER_RANK, ScheduleName, actions, forward_actions
from optimum_trn.parallel.transfers import Layouts, Transfers, broadcast_tree, floating

RunStage = Callable[[int, int, Any], Any]
"""(stage, micro-batch, what the stage before gives) to what the next stage receives; of the last stage, the loss."""


class Kept:
    """What a stage keeps of the forward pass of one micro-batch, for its backward pass."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.gradients: list[Tensor] | None = None  # of the outputs, between the two halves of a split backward pass
        self.weight_groups: Any = None


class Pipeline:
    """The stages of one copy of a model, over the ranks of a group; stage s runs on rank s modulo their number.

    `in_flight` counts the forward passes whose backward pass has not freed what they keep; `peak_in_flight` is the most
    that there were in the last step.
    """

    def __init__(self, group: RankGroup, schedule: ScheduleName, device: torch.device) -> None:
        self.group = group
        self.schedule: ScheduleName = schedule
        self.device = device
        self.num_stages = group.size * STAGES_PER_RANK[schedule]
        self.layouts = Layouts()
        self.in_flight = 0
        self.peak_in_flight = 0

    @property
    def last_rank(self) -> int:
        """The rank of the group that has the last stage."""
        return (self.num_stages - 1) % self.group.size

    def step(
        self, run: RunStage, weights: Callable[[int], list[nn.Parameter]], keys: Sequence[Hashable]
    ) -> list[Tensor]:
        """One forward and backward pass of `len(keys)` micro-batches; gradients add up in the parameters.

        `weights(stage)` are the trained parameters of a stage, `keys` what tells micro-batches of different shapes
        apart, equal on all ranks.  Returns the losses of the micro-batches where the last stage is, elsewhere nothing.
        """
        size, count = self.group.size, len(keys)
        programs = [actions(self.schedule, size, rank, count) for rank in range(size)]
        transfers = Transfers(
            self.group, programs, self.num_stages, [(True, key) for key in keys], self.layouts, self.device
        )
        kept: dict[tuple[int, int], Kept] = {}
        losses: list[Tensor] = []
        self.in_flight = self.peak_in_flight = 0
        for kind, stage, micro_batch in programs[self.group.rank]:
            place = stage, micro_batch
            if kind == "forward":
                received = transfers.receive_activations(stage, micro_batch) if stage else None
                inputs = [leaf.requires_grad_() for leaf in floating(received)]
                result = run(stage, micro_batch, received)
                if stage + 1 < self.num_stages:
                    transfers.send_activations(stage + 1, micro_batch, result)
                    kept[place] = Kept(inputs, floating(result))
                else:
                    losses.append(result.detach())
                    kept[place] = Kept(inputs, [result])
                del received, result
                self.in_flight += 1
                self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
                continue
            if kind != "weight gradient" and stage + 1 < self.num_stages:
                kept[place].gradients = transfers.receive_gradients(stage, micro_batch)
            if kind == "backward":
                _backward(kept[place])
            elif kind == "input gradient":
                _backward_inputs(kept[place], weights(stage))
            else:
                _backward_weights(kept[place], weights(stage))
            if kind != "weight gradient" and stage > 0:
                gradients = [_gradient(tensor) for tensor in kept[place].inputs]
                transfers.send_gradients(stage - 1, micro_batch, gradients)
            if kind != "input gradient":
                del kept[place]
                self.in_flight -= 1
        transfers.finish()
        return losses

    def evaluate(self, run: RunStage, key: Hashable) -> Any:
        """One forward pass without gradients of one batch; what `run` returns for the last stage, on every rank."""
        size = self.group.size
        programs = [forward_actions(self.num_stages, size, rank) for rank in range(size)]
        transfers = Transfers(self.group, programs, self.num_stages, [(False, key)], self.layouts, self.device)
        result = None
        with torch.no_grad():
            for _, stage, _ in programs[self.group.rank]:
                result = run(stage, 0, transfers.receive_activations(stage, 0) if stage else None)
                if stage + 1 < self.num_stages:
                    transfers.send_activations(stage + 1, 0, result)
        transfers.finish()
        return broadcast_tree(result, self.group, self.last_rank, self.device)

    def share_losses(self, losses: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        """The `count` losses that the rank of the last stage has, on all ranks."""
        shared = torch.zeros(count, dtype=dtype, device=self.device)
        if losses:
            shared.copy_(torch.stack(list(losses)))
        dist.broadcast(shared, group=self.group.process_group, group_src=self.last_rank)
        return shared

    @torch.no_grad()
    def sum_gradients(self, parameter: nn.Parameter, holders: Sequence[int]) -> None:
        """Sum the gradients of a parameter that several ranks of the group hold, which must all call this.

        In the order of the ranks, so that all of them have the same bits.
        """
        gradient = _gradient(parameter).contiguous()
        first, *others = holders
        if self.group.rank == first:
            for other in others:
                received = torch.empty_like(gradient)
                dist.recv(received, group=self.group.process_group, group_src=other)
                gradient = gradient + received
            for other in others:
                dist.send(gradient, group=self.group.process_group, group_dst=other)
        else:
            dist.send(gradient, group=self.group.process_group, group_dst=first)
            gradient = torch.empty_like(gradient)
            dist.recv(gradient, group=self.group.process_group, group_src=first)
        parameter.grad = gradient


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient, also of what took no part; the receiver does not ask which it is."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _outputs(kept: Kept) -> tuple[list[Tensor], list[Tensor] | None]:
    """The outputs that something trained leads to, and their gradients; None for a loss."""
    if kept.gradients is None:
        return [output for output in kept.outputs if output.requires_grad], None
    pairs = [pair for pair in zip(kept.outputs, kept.gradients, strict=True) if pair[0].requires_grad]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _backward(kept: Kept) -> None:
    outputs, gradients = _outputs(kept)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _backward_inputs(kept: Kept, weights: list[nn.Parameter]) -> None:
    if not kept.inputs:  # of the first stage: there is nothing that another one waits for
        return
    outputs, gradients = _outputs(kept)
    if outputs:
        _, kept.weight_groups = stage_backward_input(outputs, gradients, kept.inputs, iter(weights))


def _backward_weights(kept: Kept, weights: list[nn.Parameter]) -> None:
    if not kept.inputs:
        _backward(kept)
    elif kept.weight_groups is not None:
        # Weights whose ways to the inputs meet share a part of the graph; all of it is let go of with `kept`.
        stage_backward_weight(iter(weights), kept.weight_groups, retain_graph=True)
