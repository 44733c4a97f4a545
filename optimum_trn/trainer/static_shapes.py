"""Trainer's batches in few shapes: what padding does to them, undone in what evaluation and prediction return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ..patching import pipeline_of
from .padding import POWERS_OF_TWO, Padding, padding_for, parsed, why_not

logger = logging.get_logger(__name__)


class StaticShapesMixin:
    """The part of `NeuronTrainerMixin` that pads batches, as `static_shapes` of the arguments says (see padding.py).

    Batches are padded after Trainer has counted their rows and tokens, and what the model gives for them is cut back
    before it is gathered: all numbers are those of the batches as they were.
    """

    model: Any
    args: Any
    label_names: list[str]
    _padding: tuple[Any, Padding | None] = (None, None)  # of which model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shapes: dict[str, set[tuple[Any, ...]]] = {}
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if self.model.training:
            prepared = self._padded(prepared, self._train_batch_size) or prepared  # type: ignore[attr-defined]
        self._note_shapes(prepared)
        return prepared

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """As in Trainer; its results are those of the rows and tokens that were not added."""
        step = super().prediction_step  # type: ignore[misc]
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        padded = None if self._keeps_shapes_in_evaluation() else self._padded(prepared, self.args.eval_batch_size)
        if padded is None:
            result: tuple[Tensor | None, Any, Any] = step(
                model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
            return result
        loss, logits, labels = step(model, padded, prediction_loss_only, ignore_keys, **gen_kwargs)
        padding = self._padding[1]
        assert padding is not None
        return loss, padding.cut_back(logits, prepared, padded), padding.cut_back(labels, prepared, padded)

    def _keeps_shapes_in_evaluation(self) -> bool:
        """Whether what comes out could not be cut back, or a pipeline has fixed what its stages exchange already."""
        config = getattr(self.model, "config", None)
        return (
            pipeline_of(self.model) is not None
            or getattr(self.args, "predict_with_generate", False)
            or getattr(config, "is_encoder_decoder", False)
            or getattr(config, "output_hidden_states", False)
            or getattr(config, "output_attentions", False)
        )

    def _padded(self, batch: Mapping[str, Any], batch_size: int) -> dict[str, Any] | None:
        if self._padding[0] is not self.model:
            self._padding = (self.model, self._chosen_padding())
        padding = self._padding[1]
        if self.accelerator.split_batches:  # type: ignore[attr-defined]
            batch_size //= self.accelerator.num_processes  # type: ignore[attr-defined]
        return None if padding is None else padding.pad(batch, batch_size)

    def _note_shapes(self, batch: Mapping[str, Any]) -> None:
        """Say which shapes are new, after the first of training and of evaluation."""
        if self.args.device.type != "neuron":
            return
        shapes = tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, Tensor))
        kind = "Training" if self.model.training else "Evaluation"
        seen = self._shapes.setdefault(kind, set())
        if seen and shapes not in seen:
            hint = "; static_shapes='auto' pads batches to few shapes" if self._padding[1] is None else ""
            logger.info(f"{kind} meets shapes that Neuron compiles anew: {dict(shapes)}{hint}.")
        seen.add(shapes)

    def _chosen_padding(self) -> Padding | None:
        asked = getattr(self.args, "static_shapes", "none")
        if asked == "auto":
            asked = POWERS_OF_TWO if self.args.device.type == "neuron" else "none"
        if asked == "none":
            return None
        model = unwrap_peft_model(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))  # type: ignore[attr-defined]
        of_others = any(
            "compute_loss" in vars(cls) and not cls.__module__.startswith(("optimum_trn.", "transformers.trainer"))
            for cls in type(self).__mro__
        )
        own_loss = of_others or self.compute_loss_func is not None  # type: ignore[attr-defined]
        reason = why_not(model, self.args, own_loss)
        if reason is None and self.label_names != ["labels"]:
            reason = f"the labels are {self.label_names}, of which ignored values are not known"
        if reason is not None:
            logger.info(f"Batches keep their shapes, each of which Neuron compiles anew: {reason}.")
            return None
        padding = padding_for(model, parsed(asked))
        logger.info(
            f"Batches are padded ({asked.replace('_', ' ')} tokens, all rows of a batch), masked and with labels that "
            "the loss ignores, so that Neuron compiles few shapes; static_shapes='none' leaves them as they are."
        )
        return padding
