"""Chunks in the memory of this process, where they wait for the disk while training goes on."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..errors import CheckpointError
from .chunk import Chunk, ChunkStore, Extent, checksum_of


class MemoryStore:
    """A copy of everything that is put; see `ChunkStore`. Checksums are computed when they are asked for.

    `clear` keeps the memory for the next chunks of the same sizes: fresh memory costs more than the copy.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, Extent], Tensor] = {}
        self._free: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def put(self, file: str, extent: Extent, data: Tensor) -> None:
        """Copy bytes."""
        shape = (extent.rows, extent.run)
        free = self._free[shape]
        own = free.pop() if free else torch.empty(shape, dtype=torch.uint8)
        self._held[file, extent] = own.copy_(data)

    def get(self, chunk: Chunk) -> Tensor:
        """The bytes themselves, not a copy; `CheckpointError` if there are no such, or they have changed."""
        data = self._held.get((chunk.file, chunk.extent))
        if data is None or checksum_of(data) != chunk.checksum:
            raise CheckpointError(f"No such chunk of {chunk.file} is held in memory: {chunk.extent}.")
        return data

    def list(self) -> list[Chunk]:
        """Everything that is held."""
        return [Chunk(file, extent, checksum_of(data)) for (file, extent), data in self._held.items()]

    def move_to(self, other: ChunkStore) -> None:
        """Put everything into another store, in the order in which it came."""
        for (file, extent), data in list(self._held.items()):
            other.put(file, extent, data)

    def clear(self) -> None:
        """Forget everything that is held."""
        for data in self._held.values():
            self._free[tuple(data.shape)].append(data)  # type: ignore[index]
        self._held = {}
