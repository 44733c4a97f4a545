"""The checkpoints in an output directory, by their step, and which of them `save_total_limit` leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .saving import delete

NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def steps_in(output_dir: Path) -> dict[int, Path]:
    """The checkpoints in a directory, by their step."""
    if not output_dir.is_dir():
        return {}
    found = ((NAME.fullmatch(path.name), path) for path in output_dir.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in found if match}


def beyond_limit(steps: Sequence[int], save_total_limit: int | None, best: int | None) -> list[int]:
    """Which of the steps, oldest first, are too many: all but the newest ones, and the best even if it is older.

    As in transformers, the last and the best one are kept whatever the limit.
    """
    if not save_total_limit or save_total_limit < 0:
        return []
    protected = {*steps[-1:], *([best] if best in steps else [])}
    surplus = len(steps) - max(save_total_limit, len(protected))
    return [step for step in steps if step not in protected][: max(0, surplus)]


def rotate(newest: Path, save_total_limit: int | None, best_model_checkpoint: str | None) -> None:
    """Delete the checkpoints beside `newest` that are too many, each as a whole.

    Those of later steps are older: they are of a run that was started again from an earlier one, and go first.
    """
    steps = steps_in(newest.parent)
    last = step_of(newest.name) or 0
    order = sorted(steps, key=lambda step: (step <= last, step))
    for step in beyond_limit(order, save_total_limit, step_of(Path(best_model_checkpoint or "").name)):
        delete(steps[step])


def step_of(name: str) -> int | None:
    """The step of the checkpoint of that name; None of any other name."""
    match = NAME.fullmatch(name)
    return None if match is None else int(match[1])
