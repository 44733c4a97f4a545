"""Finds the checkpoint to resume from: the newest that is complete and undamaged, and why others are not."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..errors import CheckpointError
from .agreement import agreed, is_first_on_host, is_first_rank, of_first_rank
from .manifest import Manifest, check
from .remote import download, is_remote, local_directory, remote_steps
from .saving import put_complete_in_place
from .steps import steps_in

logger = logging.get_logger(__name__)


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


def newest_complete(output_dir: Path, url: str | None = None) -> tuple[Path, Manifest | None]:
    """The checkpoint of the last step that is complete and undamaged, and its manifest.

    Those at `url` that are not in `output_dir` are downloaded to it. The log says what is wrong with later ones, which
    are skipped. A collective. Raises `CheckpointError` on every rank if there is none; nothing is deleted.
    """
    where = url or output_dir
    with agreed(f"Looking for checkpoints in {where}"):
        if is_first_rank() and output_dir.is_dir():
            put_complete_in_place(output_dir)
    steps: dict[int, Path | str] = {}
    with agreed(f"Looking for checkpoints in {where}"):
        if is_first_rank():
            steps = {**(remote_steps(url) if url else {}), **steps_in(output_dir)}
    steps = of_first_rank(steps)
    skipped = []
    for step in sorted(steps, reverse=True):
        try:
            directory = present(steps[step], output_dir)
            return directory, checked(directory)
        except CheckpointError as error:
            logger.warning(f"Skipping {steps[step]}: {error}")
            skipped.append(str(error))
    raise CheckpointError(
        f"No valid checkpoint found in output directory ({where}), which resume_from_checkpoint=True asks for. "
        + " ".join(skipped)
    )


def present(location: str | Path, output_dir: Path | None = None) -> Path:
    """The directory of a checkpoint at a path or URL; one that is at a URL is downloaded first: a collective."""
    if not is_remote(str(location)):
        return Path(local_directory(str(location)))
    name = str(location).rstrip("/").rsplit("/", 1)[-1]
    directory = output_dir / name if output_dir is not None else Path(local_directory(str(location)))
    with agreed(f"Downloading {location}"):
        if is_first_on_host() and not directory.exists():
            download(str(location), directory)
    return directory
