"""Lazily reads the part of a checkpoint's tensor that this rank holds."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..parallel import Piece, Placement
from .lazy import Box, LazyTensor

# The start of a safetensors file: the length of its JSON header as an unsigned 64-bit little-endian integer
# (https://github.com/huggingface/safetensors#format).
HEADER_LENGTH = struct.Struct("<Q")


class LocalSlice:
    """Stands for this rank's part of one tensor; nothing is read before it is indexed with `[...]`.

    `source` is a safetensors slice, a (memory-mapped) tensor or a lazy one, of the placement's global shape.  Indexing
    gives a tensor of the local shape on `device`, in `dtype` (the source's own if None), in storage of its own: only
    the local pieces are read, straight from the mapped file into the device's memory.
    """

    def __init__(
        self, source: Any, placement: Placement, rank: int, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.source = source
        self.placement = placement
        self.rank = rank
        self.device = device
        self.dtype = dtype

    def __getitem__(self, index: EllipsisType) -> Tensor:
        assert index is ..., "a local slice is read as a whole"
        local = self.empty()
        self.copy_to(local)
        return local

    def empty(self) -> Tensor:
        """A tensor for it, of arbitrary entries."""
        dtype = self.dtype or dtype_of(self.source)
        return torch.empty(self.placement.local_shape(self.rank), dtype=dtype, device=self.device)

    def copy_to(self, local: Tensor) -> None:
        """Write it into a tensor of the local shape."""
        dim = self.placement.dim
        if dim is None:
            self._read(local, None)
            return
        offset = 0
        for piece in self.placement.pieces(self.rank):
            target = local.narrow(dim, offset, piece.length)
            target.zero_() if piece.start is None else self._read(target, piece)
            offset += piece.length

    def _read(self, target: Tensor, piece: Piece | None) -> None:
        """Copies a piece of the sharded dimension of the source, or all of it, into a tensor of its shape."""
        box = [(0, size) for size in self.placement.global_shape]
        if piece is not None and piece.start is not None and self.placement.dim is not None:
            box[self.placement.dim] = (piece.start, piece.start + piece.length)
        source = self.source if isinstance(self.source, LazyTensor) else Stored(self.source)
        source.copy_to(target, tuple(box))


class Stored(LazyTensor):
    """A tensor in a file: a safetensors slice, or a memory-mapped tensor."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.shape = torch.Size(shape_of(source))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Read off the file when it is asked for."""
        return dtype_of(self.source)

    def copy_to(self, target: Tensor, box: Box) -> None:
        target.copy_(self.source[tuple(slice(*ends) for ends in box)] if box else self.source[...])


def open_slices(files: Sequence[str]) -> dict[str, Any]:
    """Name to lazy safetensors slice, over all files of a checkpoint; the files stay mapped as long as a slice lives.

    Raises `CheckpointError` that names the file which is missing, cut short or no safetensors file.
    """
    slices: dict[str, Any] = {}
    for file in files:
        if not os.path.isfile(file):
            raise CheckpointError(
                f"{file} is missing, one of the {len(files)} weight files of this checkpoint. Download or copy the "
                f"checkpoint again, with every file that its index names."
            )
        try:
            handle = safe_open(file, framework="pt")
            slices.update((name, handle.get_slice(name)) for name in handle.keys())
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read: {_damage(file) or error}.") from error
    return slices


def _damage(file: str) -> str | None:
    """What is wrong with the length of a safetensors file, in bytes, or None if the length is right."""
    size = os.path.getsize(file)
    again = "It was cut short while it was written or copied: get it again"
    try:
        with open(file, "rb") as stream:
            (header_length,) = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))
            header = json.loads(stream.read(header_length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return f"its {size} bytes do not begin with a whole safetensors header. {again}"
    expected = HEADER_LENGTH.size + header_length + max(ends, default=0)
    return f"it has {size} bytes and its header announces {expected}. {again}" if size != expected else None


def same_values(first: Any, second: Any, rows: int = 1024) -> bool:
    """Whether two sources hold the same tensor; reads `rows` of dimension 0 at a time."""
    if tuple(shape_of(first)) != tuple(shape_of(second)):
        return False
    length = shape_of(first)[0] if shape_of(first) else 0
    return all(
        torch.equal(first[start : start + rows], second[start : start + rows]) for start in range(0, length, rows)
    )


def shape_of(source: Any) -> Sequence[int]:
    """The shape of a safetensors slice or of a tensor."""
    shape: Sequence[int] = source.shape if hasattr(source, "shape") else source.get_shape()
    return shape


def dtype_of(source: Any) -> torch.dtype:
    """The dtype of a safetensors slice or of a tensor."""
    if isinstance(source, (Tensor, LazyTensor)):
        return source.dtype
    empty = source[(slice(0, 0),) * len(shape_of(source)) or ...]
    dtype: torch.dtype = empty.dtype
    return dtype
