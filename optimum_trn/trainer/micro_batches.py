"""Trainer asks for one micro-batch after the other; a pipeline works on all of one optimizer step together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..patching import PipelinedModel
from .fault_tolerance import StepsTogether

TrainOn = Callable[[Any], Any]


class MicroBatches:
    """The micro-batches of one optimizer step, and their losses as far as Trainer has not asked for them yet."""

    def __init__(self) -> None:
        self.batches: Sequence[Any] = ()
        self.losses: deque[Tensor] = deque()

    def begin(self, batches: Sequence[Any]) -> None:
        """The next optimizer step takes these; losses of the step before that nobody asked for are dropped."""
        self.batches = list(batches)
        self.losses.clear()

    def next_loss(
        self, pipeline: PipelinedModel | StepsTogether, inputs: Any, prepare: TrainOn, compute_loss: TrainOn
    ) -> Tensor:
        """The loss of `inputs`, the next of the micro-batches; the first of them trains on all."""
        if not self.losses:
            batches = self.batches or [inputs]
            self.losses.extend(pipeline.step([prepare(batch) for batch in batches], compute_loss))
            self.batches = ()
        return self.losses.popleft()


@contextmanager
def deferred_backward(accelerator: Any) -> Iterator[list[Tensor]]:
    """While active, losses that the accelerator is to differentiate are only collected."""
    losses: list[Tensor] = []
    accelerator.backward = lambda loss, **_: losses.append(loss)
    try:
        yield losses
    finally:
        del accelerator.backward
