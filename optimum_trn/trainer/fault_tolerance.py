"""Training that goes on when processes are lost: where the Trainer's loop meets the engine that survives it.

Every process runs the loop of one process, over all batches; the engine computes a step together with the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer
from transformers.trainer_utils import TrainOutput

from ..device import launched

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class Engine(Protocol):
    """What a Trainer asks of the engine; it is called by all processes at the same places of their loops."""

    norm: Tensor
    on_active: Callable[[int], None]

    def step(
        self, step: int, micro_batches: Sequence[Any], compute_loss: Callable[[Any], Any], samples: Sequence[Any] = ()
    ) -> Tensor:
        """The losses of all micro-batches of a step that all processes have committed."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale this process's gradients to that norm of all; the norm before."""

    def catching_up(self, step: int) -> bool:
        """Whether this process came after the others had gone past that step."""

    def gather(self, step: int) -> None:
        """Have the whole model and optimizer in every process."""


class RecordedBatches:
    """A batch sampler that remembers the sample ids of this epoch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.batches = []
        for batch in self.sampler:
            self.batches.append(list(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)


class StepsTogether:
    """The micro-batches of a step, as `MicroBatches` asks a pipeline for their losses."""

    def __init__(self, engine: Engine, step: int, samples: Sequence[Any]) -> None:
        self.engine = engine
        self.number = step
        self.samples = samples

    def step(self, micro_batches: Sequence[Any], compute_loss: Callable[[Any], Any]) -> Tensor:
        """The losses of all of them, wherever they were computed."""
        return self.engine.step(self.number, micro_batches, compute_loss, self.samples)


class FaultToleranceMixin(_Trainer):
    """The seams of a Trainer whose engine survives losses; without an engine it changes nothing."""

    model: Any
    engine: Engine | None = None
    _position: int | None = None
    _recorded: RecordedBatches | None = None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if getattr(self.args, "fault_tolerance", None) is not None:
            if self.engine is not None:
                raise ValueError("A job with fault_tolerance trains once. Call train() in another job.")
            self._whole_parameters = sum(parameter.numel() for parameter in self.model.parameters())
            self.engine = importlib.import_module(os.environ[launched.ENGINE]).engine_of(self)
            self.engine.on_active = self._take_position
        return prepared

    def _take_position(self, position: int) -> None:
        takes_over = position == 0 and self._position not in (None, 0)
        self._position = position
        vars(self.args)["position"] = position
        self.state.is_world_process_zero = self.state.is_local_process_zero = position == 0
        for callback in self.callback_handler.callbacks if takes_over else ():
            if isinstance(callback, ProgressCallback):  # it made a bar where training began on the first process only
                callback.on_train_begin(self.args, self.state, self.control)

    def is_world_process_zero(self) -> bool:
        """As in Trainer; of the processes that survive losses, the first one that is left."""
        return super().is_world_process_zero() and getattr(self.args, "position", 0) == 0

    def get_train_dataloader(self) -> DataLoader:
        """As in Trainer; sample ids are remembered for the journal of the job."""
        loader = super().get_train_dataloader()
        if getattr(self.args, "fault_tolerance", None) is not None and loader.batch_sampler is not None:
            self._recorded = RecordedBatches(loader.batch_sampler)
            # accelerate's loaders iterate over another one; no DataLoader lets its sampler be assigned.
            vars(getattr(loader, "base_dataloader", loader))["batch_sampler"] = self._recorded
        return loader

    def _steps_together(self) -> StepsTogether | None:
        """What computes the next step, if an engine does."""
        if self.engine is None:
            return None
        count, samples = len(self.micro_batches.batches) or 1, []  # type: ignore[attr-defined]
        step, per_step = self.state.global_step, self.args.gradient_accumulation_steps
        if self._recorded is not None:
            first = step % -(-len(self._recorded) // per_step) * per_step
            samples = self._recorded.batches[first : first + count]
        return StepsTogether(self.engine, step, samples)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self.engine is None else self.engine.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm if self.engine is None else self.engine.norm)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None and (self.control.should_evaluate or self.control.should_save):
            if self.engine.catching_up(self.state.global_step):
                self.control.should_evaluate = self.control.should_save = False
            else:
                self.engine.gather(self.state.global_step)
                self.control.should_save = self.control.should_save and self.args.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        if self.engine is not None:
            self.engine.gather(self.state.global_step)
        return super()._finalize_training(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As in Trainer; of the whole model, of which this process may have some layers only."""
        if self.engine is None:
            return super().floating_point_ops(inputs)
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"), torch.empty(0)).numel()
        return 6 * tokens * self._whole_parameters
