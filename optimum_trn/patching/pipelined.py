"""A model whose layers are cut over a pipeline: training steps of micro-batches, and evaluation, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import find_labels

from optimum_trn.errors import PlanError
from optimum_trn.parallel.pipeline import Pipeline
from optimum_trn.patching.stages import StagedModel

Batch = Mapping[str, Any]
Compute = Callable[[Batch], Any]


class PipelinedModel:
    """The stages of this rank and the engine that runs them; every rank of the pipeline gets the same batches."""

    def __init__(self, model: Any, staged: StagedModel, engine: Pipeline) -> None:
        self.model = model
        self.staged = staged
        self.engine = engine

    def step(self, micro_batches: Sequence[Batch], compute_loss: Compute | None = None) -> Tensor:
        """The losses of the micro-batches, on every rank, in float32 (float64 of a model in it); adds up gradients.

        The gradient is that of the sum of the losses.  `compute_loss(batch)` runs the model on the last stage, and
        returns what the model says its loss is unless given.
        """
        compute_loss = compute_loss or self._loss
        self.staged.check_adapters()
        self._refuse_reentrant_checkpoints()
        tied = {
            name: holders
            for name, holders in self.staged.tied_over_ranks().items()
            if self.staged.parameter(name).requires_grad
        }
        earlier = {name: self.staged.parameter(name).grad for name in tied}
        for name in tied:
            self.staged.parameter(name).grad = None  # what was summed in an earlier step must not be again

        def run(stage: int, micro_batch: int, received: Any) -> Any:
            return self._run(stage, received, micro_batches[micro_batch], compute_loss)

        losses = self.engine.step(run, self.staged.weights, [shapes_of(batch) for batch in micro_batches])
        for name, holders in tied.items():
            parameter = self.staged.parameter(name)
            self.engine.sum_gradients(parameter, holders)
            before = earlier[name]
            if before is not None:
                assert parameter.grad is not None
                parameter.grad += before
        return self.engine.share_losses(losses, len(micro_batches), self._loss_dtype())

    def evaluate(self, batch: Batch, compute: Compute | None = None) -> Any:
        """What `compute(batch)` returns on the last stage, on every rank; the model's outputs unless it is given."""
        compute = compute or (lambda inputs: dict(self.model(**inputs)))
        self.staged.check_adapters()

        def run(stage: int, _: int, received: Any) -> Any:
            return self._run(stage, received, batch, compute)

        return self.engine.evaluate(run, shapes_of(batch))

    def _run(self, stage: int, received: Any, batch: Batch, compute: Compute) -> Any:
        inputs = own_inputs(self.staged, stage, batch, received)
        is_last = stage == self.staged.stages.num_stages - 1
        return self.staged.run(stage, received, lambda: compute(inputs) if is_last else self.model(**inputs))

    def _refuse_reentrant_checkpoints(self) -> None:
        """They run layers without gradients first, so that what the last one hands on would have none."""
        for module in self.model.modules():
            function = getattr(module, "_gradient_checkpointing_func", None)
            reentrant = isinstance(function, partial) and function.keywords.get("use_reentrant")
            if reentrant and getattr(module, "gradient_checkpointing", False):
                raise PlanError(
                    "gradient checkpointing with use_reentrant=True can't be combined with pipeline stages. Pass "
                    'gradient_checkpointing_kwargs={"use_reentrant": False}.'
                )

    def _loss(self, batch: Batch) -> Any:
        return self.model(**batch).loss

    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32


def own_inputs(staged: StagedModel, stage: int, batch: Batch, received: Any) -> dict[str, Any]:
    """What a stage takes of a batch: all but the last one have no loss to compute; behind an encoder it is not run."""
    inputs, stages = dict(batch), staged.stages
    if stage < stages.num_stages - 1:
        labels = {name: inputs.pop(name) for name in find_labels(type(staged.model)) if name in inputs}
        # What the stock forward makes of labels; where it does not, there is no such method.
        prepare = getattr(staged.model, "prepare_decoder_input_ids_from_labels", None)
        if stages.encoder_end is not None and prepare is not None and labels.get("labels") is not None:
            inputs.setdefault("decoder_input_ids", prepare(labels["labels"]))
    if stages.encoder_end is not None and stage > stages.encoder_end:
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=received[0])
    return inputs


def shapes_of(batch: Batch) -> Hashable:
    """What two batches have in common when all activations of the model have equal shapes."""
    return tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, Tensor))
