"""Named objects made of content-addressed chunks, in bounded memory, the least recently used on disk or forgotten."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import MissingError, StoreError
from .protocol import check_name, checksum_of_bytes


class StoredObject(NamedTuple):
    """The chunks of an object in their order, with their sizes; `pinned` if nobody else has the bytes."""

    chunks: tuple[tuple[str, int], ...]
    pinned: bool

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(size for _, size in self.chunks)


class Shelf:
    """What one store holds. A chunk stays as long as an object, or a client that is still putting one, refers to it.

    `memory` bounds the bytes in memory. Beyond it the least recently used chunks go to files in `spill`, a directory
    of this process alone; without one, chunks of no pinned object are forgotten, their bytes being elsewhere, too.
    """

    def __init__(self, memory: int, spill: Path | None = None) -> None:
        self.memory = memory
        self.spill = spill
        self.used = 0
        self.evictions = 0
        self.objects: dict[str, StoredObject] = {}
        self._memory: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self._spilled: dict[str, int] = {}
        self._references: Counter[str] = Counter()
        self._pins: Counter[str] = Counter()

    def has(self, checksum: str) -> bool:
        """Whether the bytes of a chunk are here."""
        return checksum in self._memory or checksum in self._spilled

    def hold(self, checksum: str, data: bytes) -> None:
        """Take a chunk and refer to it until `release`; `StoreError` if it is another, or there is no room."""
        if checksum_of_bytes(data) != checksum:
            raise StoreError("A chunk is refused: its bytes have another checksum than it was announced with.")
        if not self.has(checksum):
            self._admit(checksum, data)
        self.refer([checksum])

    def refer(self, checksums: Iterable[str], pinned: bool = True) -> None:
        """Keep chunks; forgetting a pinned one is not allowed."""
        for checksum in checksums:
            self._references[checksum] += 1
            self._pins[checksum] += pinned

    def release(self, checksums: Iterable[str], pinned: bool = True) -> None:
        """The opposite of `refer`: chunks to which nothing refers are gone."""
        for checksum in checksums:
            self._references[checksum] -= 1
            self._pins[checksum] -= pinned
            if not self._pins[checksum]:
                del self._pins[checksum]
            if not self._references[checksum]:
                del self._references[checksum]
                self._discard(checksum)

    def commit(self, name: str, chunks: Sequence[tuple[str, int]], pinned: bool) -> None:
        """Give an object to a name, instead of what had it; `MissingError` if a chunk is not here."""
        check_name(name)
        for checksum, size in chunks:
            if self._size(checksum) != size:
                raise MissingError(f"{name} is refused: its chunk {checksum} of {size} bytes was not put.")
        self.refer((checksum for checksum, _ in chunks), pinned)
        if name in self.objects:
            self.delete(name)
        self.objects[name] = StoredObject(tuple(chunks), pinned)

    def delete(self, name: str) -> None:
        """Forget an object; `MissingError` if there is none."""
        stored = self._find(name)
        del self.objects[name]
        self.release((checksum for checksum, _ in stored.chunks), stored.pinned)

    def read(self, name: str, offset: int, length: int) -> list[memoryview]:
        """A range of an object as views of its chunks.

        `StoreError` if it is not within the object; `MissingError` if there is no such, or its bytes were forgotten.
        """
        stored = self._find(name)
        if offset < 0 or length < 0 or offset + length > stored.size:
            raise StoreError(f"{name} has {stored.size} bytes: bytes {offset} to {offset + length} are refused.")
        views, start = [], 0
        for checksum, size in stored.chunks:
            first, last = max(offset, start), min(offset + length, start + size)
            if first < last:
                views.append(memoryview(self._bytes(name, checksum))[first - start : last - start])
            start += size
        return views

    def close(self) -> None:
        """Remove what is on disk."""
        for checksum in list(self._spilled):
            self._discard(checksum)

    def _find(self, name: str) -> StoredObject:
        stored = self.objects.get(check_name(name))
        if stored is None:
            raise MissingError(f"There is no {name} in this store.")
        return stored

    def _size(self, checksum: str) -> int | None:
        data = self._memory.get(checksum)
        return len(data) if data is not None else self._spilled.get(checksum)

    def _bytes(self, name: str, checksum: str) -> bytes:
        data = self._memory.get(checksum)
        if data is not None:
            self._memory.move_to_end(checksum)
            return data
        if checksum not in self._spilled:
            raise MissingError(f"{name} is not in this store any more: others were used more recently.")
        data = self._file(checksum).read_bytes()
        if checksum_of_bytes(data) != checksum:
            raise MissingError(f"{name} was damaged on the disk of this store: the checksum of {checksum} differs.")
        self._admit(checksum, data)
        del self._spilled[checksum]
        self._file(checksum).unlink(missing_ok=True)
        return data

    def _admit(self, checksum: str, data: bytes) -> None:
        if len(data) > self.memory:
            raise StoreError(
                f"A chunk of {len(data)} bytes does not fit a store of {self.memory}: give it more memory."
            )
        for candidate in list(self._memory) if self.used + len(data) > self.memory else ():
            if self.used + len(data) <= self.memory:
                break
            if self.spill is not None or not self._pins[candidate]:
                self._evict(candidate)
        if self.used + len(data) > self.memory:
            raise StoreError(
                f"This store is full: {self.used} of its {self.memory} bytes are in use, and nothing may be forgotten. "
                f"Delete objects, give it more memory, or a directory to spill to."
            )
        self._memory[checksum] = bytes(data)
        self.used += len(data)

    def _evict(self, checksum: str) -> None:
        data = self._memory[checksum]
        if self.spill is not None:
            unfinished = self._file(f"{checksum}.part")
            unfinished.write_bytes(data)
            os.replace(unfinished, self._file(checksum))
            self._spilled[checksum] = len(data)
        del self._memory[checksum]
        self.used -= len(data)
        self.evictions += 1

    def _discard(self, checksum: str) -> None:
        data = self._memory.pop(checksum, None)
        if data is not None:
            self.used -= len(data)
        if self._spilled.pop(checksum, None) is not None:
            self._file(checksum).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        assert self.spill is not None
        return self.spill / name  # of a checksum that this process has computed: never of what a client calls it
