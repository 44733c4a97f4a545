"""A pipeline whose random numbers follow from the step, the micro-batch and the layer: not from who computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimum_trn.parallel.pipeline import Pipeline
from optimum_trn.parallel.random import Generators
from optimum_trn.patching.pipelined import Batch, Compute, PipelinedModel
from optimum_trn.patching.stages import StagedModel


class SeededPipeline(PipelinedModel):
    """A `PipelinedModel` that draws the same numbers for a micro-batch, however often and wherever it is computed."""

    def __init__(self, model: Any, staged: StagedModel, engine: Pipeline, seed: int) -> None:
        super().__init__(model, staged, engine)
        self.seed = seed
        self._at = 0, 0
        self._places: dict[int, int] = {}
        self._hooks = [self._seed_before(model.get_submodule(path), path) for path in staged.local]

    def step_at(self, step: int, first: int, micro_batches: Sequence[Batch], compute_loss: Compute) -> Tensor:
        """As `step`, for the micro-batches from number `first` on of a step; draws nothing from the common stream."""
        self._places = {id(batch): first + place for place, batch in enumerate(micro_batches)}
        self._at = step, first
        generators = Generators(self.engine.device)
        try:
            return self.step(micro_batches, compute_loss)
        finally:
            generators.restore()

    def close(self) -> None:
        """Take the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()

    def _run(self, stage: int, received: Any, batch: Batch, compute: Compute) -> Any:
        self._at = self._at[0], self._places[id(batch)]
        return super()._run(stage, received, batch, compute)

    def _seed_before(self, module: nn.Module, path: str) -> RemovableHandle:
        def hook(*_: Any) -> None:
            text = f"{self.seed} {self._at[0]} {self._at[1]} {path}"
            torch.manual_seed(xxhash.xxh3_64_intdigest(text.encode()) >> 1)

        return module.register_forward_pre_hook(hook)
