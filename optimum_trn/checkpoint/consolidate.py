"""Makes a stock directory of any training checkpoint, on the CPU, a chunk of a file at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from fsspec.core import url_to_fs
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from ..errors import CheckpointError
from ..store.directory import sync
from . import manifest, optimizer_state
from .find import checked, newest_complete, present
from .remote import is_remote, upload_files
from .saving import put_in_place
from .steps import steps_in

TRAINING_ONLY = {
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    manifest.FILE_NAME,
    optimizer_state.FILE_NAME,
}
"""What only training needs; with the random states (`rng_state*`, `random_states_*`) the rest of a checkpoint."""

WEIGHTS = (".safetensors", ".bin")


def consolidate(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> Path:
    """Write the stock directory of a checkpoint, for `from_pretrained`: config, weights, tokenizer, or a PEFT adapter.

    `checkpoint` is one of a NeuronTrainer at any layout, of a Trainer, or of `Accelerator.save_state`; or an output
    directory with several, of which the newest complete one is taken. Either may be a URL that fsspec knows. What is
    read is compared with its checksums first, and copied in blocks: whatever the size, memory for one block is all that
    this takes. Returns the directory of the checkpoint that was taken.

    Raises `CheckpointError` if the checkpoint is damaged, or has no weights, or if there is something at `output`.
    """
    source = present(os.fspath(checkpoint))
    if steps_in(source):
        source, _ = newest_complete(source)
    else:
        checked(source)
    files = [path for path in source.iterdir() if path.is_file() and not _is_training_only(path.name)]
    if not any(path.suffix in WEIGHTS for path in files):
        raise CheckpointError(f"{source} holds no weights that could be written to {output}.")
    if is_remote(os.fspath(output)):
        filesystem, path = url_to_fs(os.fspath(output))
        if filesystem.exists(path):
            raise CheckpointError(f"{output} is there already: remove it, or give another place.")
        with tempfile.TemporaryDirectory() as stock:
            _copy(files, Path(stock))
            upload_files(Path(stock), os.fspath(output))
        return source
    target = present(os.fspath(output))
    if target.exists():
        raise CheckpointError(f"{output} is there already: remove it, or give another place.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="_consolidating-", dir=target.parent) as unfinished:
        stock_directory = Path(unfinished, target.name)
        stock_directory.mkdir()
        _copy(files, stock_directory)
        put_in_place(stock_directory, target)
    return source


def _is_training_only(name: str) -> bool:
    return name in TRAINING_ONLY or name.startswith(("rng_state", "random_states_"))


def _copy(files: list[Path], directory: Path) -> None:
    for path in files:
        shutil.copyfile(path, directory / path.name)
    sync([*(directory / path.name for path in files), directory])
