"""What one rank writes of a checkpoint as one run of bytes: its chunks and small files, each with a checksum."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointError
from ..store import Chunk, ChunkStore, Extent
from ..store.chunk import checksum_of

HEAD = struct.Struct("<8sQ16s")  # magic, bytes of the JSON that follows, its XXH3 of 128 bits
MAGIC = b"OTMEMCK1"


class Packed:
    """A `ChunkStore` that collects chunks; `content` is all of them, described by JSON in front."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._data: list[Tensor] = []

    def put(self, file: str, extent: Extent, data: Tensor) -> None:
        """Take bytes; they are not copied before `content`."""
        data = data.to("cpu").contiguous()
        self._chunks.append(Chunk(file, extent, checksum_of(data)))
        self._data.append(data)

    def put_files(self, directory: Path) -> None:
        """Take all files below a directory."""
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = path.read_bytes()
            data = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
            self.put(str(path.relative_to(directory)), Extent(0, len(content), len(content), 1), data.view(1, -1))

    def get(self, chunk: Chunk) -> Tensor:
        """The bytes of a chunk."""
        return self._data[self._chunks.index(chunk)]

    def list(self) -> list[Chunk]:
        """What was put."""
        return list(self._chunks)

    def content(self, about: Mapping[str, Any]) -> bytearray:
        """Everything, and what is said `about` it."""
        entries = [[chunk.file, *chunk.as_json()] for chunk in self._chunks]
        text = json.dumps({"about": dict(about), "chunks": entries}).encode()
        head = HEAD.pack(MAGIC, len(text), xxhash.xxh3_128_digest(text)) + text
        buffer = bytearray(len(head) + sum(chunk.extent.size for chunk in self._chunks))
        buffer[: len(head)] = head
        flat, place = torch.frombuffer(buffer, dtype=torch.uint8), len(head)
        for data in self._data:
            flat[place : place + data.numel()] = data.view(-1)
            place += data.numel()
        return buffer


def about(content: bytearray) -> dict[str, Any]:
    """What is said about packed chunks; `CheckpointError` if this is damaged."""
    described: dict[str, Any] = _described(content)[0]["about"]
    return described


def files(content: bytearray) -> set[str]:
    """The files that the chunks belong to, as paths; `CheckpointError` for one that leads out of a directory."""
    found = {str(entry[0]) for entry in _described(content)[0]["chunks"]}
    for file in found:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"A memory checkpoint is refused: it has a file {file!r}.")
    return found


def check(content: bytearray) -> None:
    """`CheckpointError` unless everything is what was packed."""
    for chunk, data in _chunks(content):
        if checksum_of(data) != chunk.checksum:
            raise CheckpointError(f"A memory checkpoint is damaged: a chunk of {chunk.file} has another checksum.")


def unpack(content: bytearray, into: ChunkStore) -> None:
    """Put the chunks into another store; they should be checked before."""
    for chunk, data in _chunks(content):
        into.put(chunk.file, chunk.extent, data)


def _chunks(content: bytearray) -> Iterator[tuple[Chunk, Tensor]]:
    described, place = _described(content)
    flat = torch.frombuffer(content, dtype=torch.uint8)
    for file, *entry in described["chunks"]:
        chunk = Chunk.from_json(file, entry)
        data = flat[place : place + chunk.extent.size]
        if data.numel() != chunk.extent.size:
            raise CheckpointError(f"A memory checkpoint is cut short within a chunk of {file}.")
        yield chunk, data.view(chunk.extent.rows, chunk.extent.run)
        place += chunk.extent.size


def _described(content: bytearray) -> tuple[dict[str, Any], int]:
    try:
        magic, size, digest = HEAD.unpack_from(content)
        text = bytes(content[HEAD.size : HEAD.size + size])
        if magic != MAGIC or xxhash.xxh3_128_digest(text) != digest:
            raise ValueError("another checksum")
        described: dict[str, Any] = json.loads(text)
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"The description of a memory checkpoint is damaged: {error}.") from None
    return described, HEAD.size + size
