"""A chunk: bytes of a file that belong together, where they lie in it, and their checksum."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import xxhash
from torch import Tensor


class Extent(NamedTuple):
    """`rows` runs of `run` bytes, the first at `offset` of a file, and each `stride` bytes after the one before.

    A shard of the rows of a matrix is one run; one of its columns is a run in every row.
    """

    offset: int
    run: int
    stride: int
    rows: int

    @property
    def size(self) -> int:
        """How many bytes these are."""
        return self.run * self.rows

    @property
    def offsets(self) -> range:
        """Where the runs begin."""
        step = max(1, self.stride)
        return range(self.offset, self.offset + step * self.rows, step)


class Chunk(NamedTuple):
    """What a store holds of a file: an extent, and the checksum of its bytes."""

    file: str
    extent: Extent
    checksum: str

    def as_json(self) -> list[Any]:
        """All but the file: how checkpoints list their chunks, by file."""
        return [*self.extent, self.checksum]

    @classmethod
    def from_json(cls, file: str, entry: list[Any]) -> Chunk:
        """What `as_json` gave; ValueError or TypeError for anything else."""
        *extent, checksum = entry
        return cls(file, Extent(*map(int, extent)), str(checksum))


class ChunkStore(Protocol):
    """Where the chunks of a set of files are: a directory, this process's memory, that of a peer."""

    def put(self, file: str, extent: Extent, data: Tensor) -> None:
        """Take bytes: a uint8 tensor of shape (rows, run) on any device, in any layout."""

    def get(self, chunk: Chunk) -> Tensor:
        """Its bytes, a uint8 tensor of shape (rows, run) on the CPU; `CheckpointError` if they are not these."""

    def list(self) -> list[Chunk]:
        """Everything that was put."""


def checksum_of(data: Tensor) -> str:
    """XXH3 of 128 bits (https://xxhash.com) of contiguous bytes: finds damage at the speed of memory, not forgery."""
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
