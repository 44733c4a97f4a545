"""Evaluation over data-parallel ranks: rows that only fill the last batch take no part in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.utils.operations import find_batch_size, recursively_apply
from torch import Tensor

IGNORE_INDEX = -100  # of torch.nn.functional.cross_entropy, and of every label in transformers


@dataclass(frozen=True)
class Share:
    """This rank's rows of one global batch: how many it was given, how many of them are real.

    A batch of pairs has all first halves before all second ones: `parts` is 2 then, and rows count in each part.
    """

    rows: int
    real: int
    parts: int = 1

    @property
    def kept(self) -> int:
        """How many rows are evaluated: the real ones, or one without labels, since a model can't run on none."""
        return max(self.real, 1)


def share_of_batch(inputs: Mapping[str, Any], accelerator: Accelerator, parts: int = 1) -> Share:
    """Count the real rows: the global batch is cut in rank order, and what fills it up comes last."""
    rows = (find_batch_size(inputs) or 0) // parts
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return Share(rows, rows, parts)
    return Share(rows, min(max(state.remainder - accelerator.process_index * rows, 0), rows), parts)


def real_rows_of(inputs: Mapping[str, Any], share: Share, label_names: Sequence[str]) -> dict[str, Any]:
    """The inputs without the filling rows; where all are filling, one row whose labels are ignored."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != share.rows * share.parts:
            return tensor
        return torch.cat([part[: share.kept] for part in tensor.chunk(share.parts)])

    if share.kept == share.rows and share.real > 0:
        return dict(inputs)
    inputs = dict(recursively_apply(cut, dict(inputs)))
    for name in label_names:
        if share.real == 0 and name in inputs and not inputs[name].is_floating_point():
            inputs[name] = torch.full_like(inputs[name], IGNORE_INDEX)
    return inputs


def filled_up(outputs: Any, share: Share) -> Any:
    """Outputs with as many rows as the rank was given, so that all ranks gather equally many."""

    def fill(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] not in (share.kept, share.kept * share.parts):
            return tensor
        parts = tensor.chunk(tensor.shape[0] // share.kept)
        filling = (share.rows - share.kept, *tensor.shape[1:])
        return torch.cat([piece for part in parts for piece in (part, part[-1:].expand(filling))])

    return outputs if outputs is None or share.kept == share.rows else recursively_apply(fill, outputs)


def weight_of(inputs: Mapping[str, Any], share: Share, label_names: Sequence[str]) -> int | Tensor:
    """How much this rank's mean loss weighs: its labels that are not ignored, or its rows if labels are not classes."""
    labels = next((inputs[name] for name in label_names if isinstance(inputs.get(name), Tensor)), None)
    if labels is None or labels.is_floating_point():
        return share.real
    return (labels != IGNORE_INDEX).sum()


def gathered(accelerator: Any, use_gather_object: bool, every_loss: bool, data: Any) -> Any:
    """What the data-parallel ranks give, without the rows that only fill the last batch.

    With `every_loss` the losses, which are repeated for each row, stay as many as in a whole batch, as they do in one
    process where nothing is dropped.
    """
    if every_loss and accelerator.num_processes == 1:
        return data  # nothing fills the last batch, and generation may have made several rows of each of its rows
    if every_loss and isinstance(data, Tensor) and data.ndim == 1 and data.is_floating_point():
        return accelerator.gather(data)
    return accelerator.gather_for_metrics(data, use_gather_object=use_gather_object)


@contextmanager
def batch_size_of_a_rank(args: Any, accelerator: Accelerator) -> Iterator[None]:
    """While active, `args` name the rows that a rank is given, where `split_batches` shares the batch out.

    Trainer repeats the loss of a batch as often as these say before it averages; with the unsplit number the rows of
    a last, partial batch would weigh less than others.
    """
    ranks = accelerator.num_processes if accelerator.split_batches else 1
    whole = args.per_device_eval_batch_size
    args.per_device_eval_batch_size = max(whole // ranks, 1)
    try:
        yield
    finally:
        args.per_device_eval_batch_size = whole


class StepRate:
    """The steps per second of one evaluation: Trainer counts every process as one that has rows of its own."""

    def __init__(self, prefix: str, rows: int, batch_size: int, accelerator: Accelerator, world_size: int) -> None:
        self.key = f"{prefix}_steps_per_second"
        ranks = 1 if accelerator.split_batches else accelerator.num_processes
        self.steps = math.ceil(rows / (batch_size * ranks))
        self.counted = math.ceil(rows / (batch_size * world_size))

    def corrected(self, rate: float) -> float:
        """Trainer's rate, by the number of steps that there were."""
        return round(rate * self.steps / max(self.counted, 1), 3)
