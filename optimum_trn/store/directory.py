"""Files in a directory, of which many processes write and read chunks at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .chunk import Chunk, Extent, checksum_of


class DirectoryStore:
    """Puts chunks where they belong in the files of a directory, which grow as they come; see `ChunkStore`.

    Raises OSError where the disk does.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._chunks: list[Chunk] = []
        self._open: dict[str, int] = {}

    def put(self, file: str, extent: Extent, data: Tensor) -> None:
        """Write bytes to the file."""
        data = data.to("cpu").contiguous()
        if file not in self._open:
            self._open[file] = os.open(self.directory / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        for offset, run in zip(extent.offsets, data.numpy(), strict=True):
            _write(self._open[file], run.data, offset)
        self._chunks.append(Chunk(file, extent, checksum_of(data)))

    def get(self, chunk: Chunk) -> Tensor:
        """Read bytes; `CheckpointError` says where they are missing or are others than were put."""
        data = self._read(chunk.file, chunk.extent)
        if checksum_of(data) != chunk.checksum:
            first, end = chunk.extent.offset, chunk.extent.offsets[-1] + chunk.extent.run
            path = self.directory / chunk.file
            raise CheckpointError(f"{path} is damaged between bytes {first} and {end}: the checksum differs.")
        return data

    def describe(self, file: str, extent: Extent) -> Chunk:
        """The chunk that an extent of a file is now."""
        return Chunk(file, extent, checksum_of(self._read(file, extent)))

    def _read(self, file: str, extent: Extent) -> Tensor:
        path = self.directory / file
        data = torch.empty((extent.rows, extent.run), dtype=torch.uint8)
        try:
            with open(path, "rb", buffering=0) as stream:
                for offset, run in zip(extent.offsets, data.numpy(), strict=True):
                    if os.preadv(stream.fileno(), [run.data], offset) != extent.run:
                        raise CheckpointError(f"{path} is cut short: it ends before byte {offset + extent.run}.")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing.") from None
        return data

    def list(self) -> list[Chunk]:
        """What this object has put."""
        return list(self._chunks)

    def close(self) -> None:
        """Have all that was put on the disk."""
        while self._open:
            _, descriptor = self._open.popitem()
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def abandon(self) -> None:
        """Close what is open, whether it is on the disk or not."""
        while self._open:
            os.close(self._open.popitem()[1])


def sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Have files, or the entries of directories, on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
