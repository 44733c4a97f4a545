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

# The start of a safetensors file: the length of its JSON header as an unsigned 64-bit little-endian integer
# (https://github.com/huggingface/safetensors#format).
HEADER_LENGTH = struct.Struct("<Q")


class LocalSlice:
    """Stands for this rank's part of one tensor; nothing is read before it is indexed with `[...]`.

    `source` is a safetensors slice or a (memory-mapped) tensor of the placement's global shape.  Indexing gives a
    tensor of the local shape on `device`, in `dtype` (the source's own if None), in storage of its own: only the local
    pieces are read, straight from the mapped file into the device's memory.
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
        pieces = self.placement.pieces(self.rank)
        views = [self._view(piece) for piece in pieces] or [self.source[...]]
        dtype = self.dtype or next(view.dtype for view in views if view is not None)
        local = torch.empty(self.placement.local_shape(self.rank), dtype=dtype, device=self.device)
        if self.placement.dim is None:
            return local.copy_(self.source[...])
        offset = 0
        for piece, view in zip(pieces, views, strict=True):
            target = local.narrow(self.placement.dim, offset, piece.length)
            target.zero_() if view is None else target.copy_(view)
            offset += piece.length
        return local

    def _view(self, piece: Piece) -> Tensor | None:
        """The piece of the source, or None for padding."""
        if piece.start is None:
            return None
        index = (slice(None),) * (self.placement.dim or 0) + (slice(piece.start, piece.start + piece.length),)
        view: Tensor = self.source[index]
        return view


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
    shape: Sequence[int] = source.get_shape() if hasattr(source, "get_shape") else source.shape
    return shape
