"""A learning rate schedule in a loop of one's own: stepped as often as there are data-parallel ranks."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler


class DataParallelScheduler(AcceleratedScheduler):
    """accelerate's wrapper, which steps a schedule once for every process, since each has a batch of its own.

    Ranks that share a model have one batch together: they would go through the schedule too fast.
    """

    def __init__(self, prepared: AcceleratedScheduler, num_replicas: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        self.steps = 1 if prepared.split_batches else num_replicas

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step for each data-parallel rank, when the optimizer has stepped; none beyond `total_steps`."""
        if not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            return super().step(*args, **kwargs)
        for _ in range(self.steps):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)
