"""One checkpoint on its way: all ranks write it beside its place, and it moves there when it is whole.

The directory `_saving-NAME` holds what nobody may read yet. The process that commits adds the manifest when all ranks
have written, and renames; a directory that is replaced or deleted is renamed to `_deleting-NAME` first. A process may
die at any moment of this: what has its name is complete.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError
from ..store import Chunk, DirectoryStore, MemoryStore
from ..store.directory import sync
from .agreement import agreed
from .manifest import FILE_NAME, Manifest, cover
from .shared_files import SharedFiles

SAVING, DELETING = "_saving-", "_deleting-"


class Saving:
    """A checkpoint that will be at `directory`; ranks put files into `staging`, and note in `files` what they share.

    To make one is a collective over the world. `commits` says whether this process moves it to its place, and `origin`
    what its manifest says of where it comes from. `CheckpointError` on every rank if the directory can't be made.
    """

    def __init__(self, directory: Path, origin: Mapping[str, Any], commits: bool) -> None:
        self.directory = directory
        self.origin = dict(origin)
        self.commits = commits
        self.outer = directory.parent / f"{SAVING}{directory.name}"
        self.staging = self.outer / directory.name
        self.files = SharedFiles()
        self.committed: list[Callable[[], None]] = []
        """Called by the process that commits, when the checkpoint is in its place."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        with agreed(f"Preparing to save {directory}"):
            if commits:
                clear_leftovers(directory.parent)
                self.staging.mkdir(parents=True)

    def start(self, memory: MemoryStore, group: dist.ProcessGroup | None) -> None:
        """Write what is noted from a copy in `memory`, in a thread whose ranks talk in `group`, and go on."""
        memory.clear()
        self.files.put_into(memory)

        def work() -> None:
            try:
                self._write_and_commit(memory.move_to, group)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name=f"saving {self.directory.name}")
        self._thread.start()

    def finish(self) -> None:
        """Return when the checkpoint is in its place; a collective, and `CheckpointError` on every rank if it isn't."""
        if self._thread is None:
            self._write_and_commit(self.files.put_into, None)
            return
        self._thread.join()
        with agreed(f"Saving {self.directory}"):
            if self._error is not None:
                raise self._error

    def _write_and_commit(self, put_into: Callable[[DirectoryStore], None], group: dist.ProcessGroup | None) -> None:
        with agreed(f"Saving {self.directory}", group):
            chunks = self._trying(lambda: self._write(put_into))
        if dist.is_initialized():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, chunks, group=group)
            chunks = [chunk for found in of_ranks for chunk in found]
        with agreed(f"Saving {self.directory}", group):
            if self.commits:
                self._trying(lambda: self._commit(chunks))

    def _trying(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} could not be saved: {error}. Nothing that was saved before has changed."
            ) from error

    def _write(self, put_into: Callable[[DirectoryStore], None]) -> list[Chunk]:
        store = DirectoryStore(self.staging)
        try:
            put_into(store)
            store.close()
        finally:
            store.abandon()
        return store.list()

    def _commit(self, chunks: list[Chunk]) -> None:
        covered, sizes = cover(self.staging, chunks)
        sync(self.staging / file for file in set(sizes) - {chunk.file for chunk in chunks})
        Manifest(tuple(covered), sizes, self.origin).write(self.staging)
        sync([self.staging])
        put_in_place(self.staging, self.directory)
        shutil.rmtree(self.outer, ignore_errors=True)
        for function in self.committed:
            function()


def put_in_place(staging: Path, directory: Path) -> None:
    """Give a complete checkpoint its name; one that had it before goes."""
    if directory.exists():
        os.replace(directory, _free_name(directory))
    os.replace(staging, directory)
    sync([directory.parent])
    _clear_deleted(directory.parent)


def delete(directory: Path) -> None:
    """Delete a checkpoint: at no moment is a part of it under its name."""
    os.replace(directory, _free_name(directory))
    sync([directory.parent])
    _clear_deleted(directory.parent)


def _free_name(directory: Path) -> Path:
    _clear_deleted(directory.parent)
    return directory.parent / f"{DELETING}{directory.name}"


def _clear_deleted(parent: Path) -> None:
    for path in parent.glob(f"{DELETING}*"):
        shutil.rmtree(path, ignore_errors=True)


def put_complete_in_place(parent: Path) -> None:
    """Put those checkpoints in their places whose process died when they were complete, and just before it did."""
    for outer in sorted(parent.glob(f"{SAVING}*")):
        staging = outer / outer.name.removeprefix(SAVING)
        if (staging / FILE_NAME).exists() and not (parent / staging.name).exists():
            put_in_place(staging, parent / staging.name)


def clear_leftovers(parent: Path) -> None:
    """Remove what processes that died have left incomplete, or to be deleted."""
    put_complete_in_place(parent)
    for outer in parent.glob(f"{SAVING}*"):
        shutil.rmtree(outer, ignore_errors=True)
    _clear_deleted(parent)
