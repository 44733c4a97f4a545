"""What a file in the pool is made of: pieces with checksums, the stores that hold them, and where it came from."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import StoreError


class Piece(NamedTuple):
    """Consecutive bytes of a file, their XXH3-128 checksum, and the stores that hold them, the preferred one first."""

    offset: int
    length: int
    checksum: str
    stores: tuple[int, ...]


@dataclass(frozen=True)
class FileManifest:
    """The pieces of a file in their order; `origin` is the URL of the file that the pool may read again, if any."""

    name: str
    size: int
    pieces: tuple[Piece, ...]
    origin: str | None
    strategy: str

    def object_of(self, piece: Piece) -> str:
        """The name of the object that holds a piece: another one if the bytes are others."""
        return f"{pieces_prefix(self.name)}{piece.offset}-{piece.checksum}"

    def within(self, offset: int, length: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that a range touches, and which bytes of each: offset in the piece, length."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise StoreError(f"{self.name} has {self.size} bytes: bytes {offset} to {offset + length} are refused.")
        index = max(0, bisect_right(self.pieces, offset, key=lambda piece: piece.offset) - 1)
        for piece in self.pieces[index:]:
            first, last = max(offset, piece.offset), min(offset + length, piece.offset + piece.length)
            if first < last:
                yield piece, first - piece.offset, last - first
            elif piece.offset >= offset + length:
                return

    def encode(self) -> bytes:
        """As JSON."""
        entries = {"size": self.size, "origin": self.origin, "strategy": self.strategy, "pieces": self.pieces}
        return json.dumps(entries, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, name: str, data: bytes | bytearray) -> FileManifest:
        """What `encode` gave; `StoreError` for anything else."""
        try:
            entries: dict[str, Any] = json.loads(data)
            pieces = tuple(
                Piece(int(offset), int(length), str(checksum), tuple(int(store) for store in stores))
                for offset, length, checksum, stores in entries["pieces"]
            )
            ends = [0, *(piece.offset + piece.length for piece in pieces)]
            if [*(piece.offset for piece in pieces), int(entries["size"])] != ends:
                raise ValueError("its pieces do not follow each other")
            return cls(name, ends[-1], pieces, entries["origin"], str(entries["strategy"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"The pool's record of {name} is damaged: {error!r}.") from None


def pieces_prefix(name: str) -> str:
    """What the names of the objects with the pieces of a file begin with."""
    return f"pieces/{name}/"


def manifest_name(name: str) -> str:
    """The name of the object that holds the manifest of a file, on every store."""
    return f"files/{name}"
