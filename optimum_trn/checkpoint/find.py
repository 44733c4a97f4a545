"""Finds the checkpoint to resume from: the newest that is complete and undamaged, and why others are not."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..errors import CheckpointError
from .agreement import agreed, is_first_rank
from .manifest import Manifest, check
from .saving import put_complete_in_place

logger = logging.get_logger(__name__)
NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def checked(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint that is complete and undamaged, on every rank; None if transformers wrote it.

    A collective. `CheckpointError` says what is wrong with it.
    """
    with agreed(f"Reading {directory}"):
        if not directory.is_dir():
            raise CheckpointError(f"Can't find a valid checkpoint at {directory}: there is no such directory.")
        manifest = Manifest.read(directory)
        if manifest is None:
            try:
                json.loads((directory / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"Can't find a valid checkpoint at {directory}: {TRAINER_STATE_NAME}, which transformers writes "
                    "last, is missing or cut short. Saving was interrupted; resume from an earlier checkpoint."
                ) from error
    check(directory, manifest)
    return manifest


def newest_complete(output_dir: Path) -> tuple[Path, Manifest | None]:
    """The checkpoint of the last step that is complete and undamaged, and its manifest.

    The log says what is wrong with later ones, which are skipped.

    A collective. Raises `CheckpointError` on every rank if there is none; nothing is deleted.
    """
    with agreed(f"Looking for checkpoints in {output_dir}"):
        if is_first_rank() and output_dir.is_dir():
            put_complete_in_place(output_dir)
    with agreed(f"Looking for checkpoints in {output_dir}"):
        steps = steps_in(output_dir)
    skipped = []
    for step in sorted(steps, reverse=True):
        try:
            return steps[step], checked(steps[step])
        except CheckpointError as error:
            logger.warning(f"Skipping {steps[step]}: {error}")
            skipped.append(str(error))
    raise CheckpointError(
        f"No valid checkpoint found in output directory ({output_dir}), which resume_from_checkpoint=True asks for. "
        + " ".join(skipped)
    )


def steps_in(output_dir: Path) -> dict[int, Path]:
    """The checkpoints in a directory, by their step."""
    if not output_dir.is_dir():
        return {}
    found = ((NAME.fullmatch(path.name), path) for path in output_dir.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in found if match}
