"""The manifest of a checkpoint: its chunks with their checksums, and at which layout it was written.

It is written last, and then the directory gets its name: a checkpoint that has its name is complete.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils import logging

from ..errors import CheckpointError
from ..store import Chunk, DirectoryStore, Extent
from .agreement import agreed
from .shared_files import CHUNK_BYTES

logger = logging.get_logger(__name__)

FILE_NAME = "checkpoint.json"
VERSION = 1
WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[^/]*\.(safetensors|bin)")
"""The names of weight files, as transformers and PEFT choose them."""
ON_PURPOSE = f"If you replaced it on purpose, delete {FILE_NAME} beside it: nothing is checked then."


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of. `origin` says where it comes from, in the words of who wrote it."""

    chunks: tuple[Chunk, ...]
    sizes: Mapping[str, int]
    origin: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        """Put it on the disk, beside the files."""
        by_file: dict[str, list[Any]] = defaultdict(list)
        for chunk in self.chunks:
            by_file[chunk.file].append(chunk.as_json())
        files = {file: {"bytes": self.sizes[file], "chunks": by_file[file]} for file in sorted(self.sizes)}
        text = json.dumps({"version": VERSION, "origin": dict(self.origin), "files": files})
        unfinished = directory / f"{FILE_NAME}.tmp"
        with open(unfinished, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, directory / FILE_NAME)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """That of a checkpoint; None of one that another program wrote. `CheckpointError` if it can't be read."""
        path = directory / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise CheckpointError(
                    f"{path} is of version {content['version']}, and this is version {VERSION}: resume with the "
                    "version of optimum_trn that wrote it."
                )
            files = content["files"]
            chunks = [Chunk.from_json(file, entry) for file, found in files.items() for entry in found["chunks"]]
            sizes = {file: int(found["bytes"]) for file, found in files.items()}
            return cls(tuple(chunks), sizes, content["origin"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is damaged: {error!r}.") from error


def cover(directory: Path, chunks: Iterable[Chunk]) -> tuple[list[Chunk], dict[str, int]]:
    """All chunks of the files in a directory, and the files' sizes: `chunks`, and of other files what is in them.

    Raises `CheckpointError` for a file of which `chunks` are not the whole.
    """
    known: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        known[chunk.file].append(chunk)
    present = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    sizes = {file: (directory / file).stat().st_size for file in present}
    for file, found in known.items():
        written = sum(chunk.extent.size for chunk in found)
        if sizes.get(file) != written:
            raise CheckpointError(
                f"{directory / file} has {sizes.get(file, 0):,} bytes where the ranks wrote {written:,}: all of them "
                "must see the same directory. Save to a file system that all hosts share."
            )
    store = DirectoryStore(directory)
    for file in present:
        if file not in known:
            known[file] = [
                _whole_chunk(store, file, offset, sizes[file]) for offset in range(0, sizes[file], CHUNK_BYTES)
            ]
    return [chunk for file in sorted(known) for chunk in known[file]], sizes


def _whole_chunk(store: DirectoryStore, file: str, offset: int, size: int) -> Chunk:
    length = min(CHUNK_BYTES, size - offset)
    return store.describe(file, Extent(offset, length, length, 1))


def check(directory: Path, manifest: Manifest | None) -> None:
    """Raise `CheckpointError` on every rank unless all files of a checkpoint are what was written; a collective.

    The ranks share out the reading. Of a checkpoint without a manifest there is nothing to compare.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with agreed(f"Checking {directory}"):
        if manifest is None:
            return
        replaced = _replaced(directory, manifest)
        store = DirectoryStore(directory)
        for file, size in manifest.sizes.items():
            path = directory / file
            if file in replaced:
                continue
            if not path.is_file():
                raise CheckpointError(f"{path} is missing.")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size:,} bytes where {size:,} were written. {ON_PURPOSE}"
                )
        for chunk in [chunk for chunk in manifest.chunks if chunk.file not in replaced][rank::ranks]:
            try:
                store.get(chunk)
            except CheckpointError as error:
                raise CheckpointError(f"{error} {ON_PURPOSE}") from None


def _replaced(directory: Path, manifest: Manifest) -> set[str]:
    """The weight files, and their index, that were exchanged for others of other names, as converting them does."""
    known = set(filter(WEIGHTS.fullmatch, manifest.sizes))
    others = {path.name for path in directory.iterdir() if WEIGHTS.fullmatch(path.name)} - known
    gone = {file for file in known if not (directory / file).exists()}
    if not gone or not others:
        return set()
    logger.warning(f"{directory} has other weight files than were saved ({', '.join(sorted(others))}): not checked.")
    return gone | {file for file in manifest.sizes if file.endswith(".index.json")}
