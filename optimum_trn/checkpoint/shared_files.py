"""Safetensors files that many ranks write at the same time, each the bytes that it holds, without communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..store import ChunkStore, Extent
from .lazy import LazyTensor
from .safetensors_writer import header_of

CHUNK_BYTES = 16 * 2**20
"""At most so much of a tensor is copied at a time, and has one checksum."""


class Write(NamedTuple):
    """Entries of a tensor in a file: where that tensor begins, in bytes, and which part of it `target` is."""

    file: str
    start: int
    target: Tensor
    entries: Tensor


class SharedFiles:
    """What this rank writes to the files of a checkpoint; every rank describes the same files, in any order.

    The leaves of the tensors are `Held` with `SharedFiles.write`. Nothing is written, or copied, before `put_into`.
    """

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self._place = ("", 0)

    def write(self, target: Tensor, entries: Tensor) -> None:
        """Note what goes where in the tensor that is being added."""
        self.writes.append(Write(*self._place, target, entries))

    def add(self, file: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str], header: bool) -> None:
        """One more file, of which this rank writes the header if `header` says so, and what its leaves hold."""
        whole = {name: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta") for name, lazy in tensors.items()}
        text, offsets = header_of(whole, metadata)
        if header:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self.writes.append(Write(file, 0, content.to("meta"), content))
        for name, lazy in tensors.items():
            self._place = (file, len(text) + offsets[name])
            lazy.copy_to(whole[name], tuple((0, size) for size in lazy.shape))

    def put_into(self, store: ChunkStore) -> None:
        """Copy all of it, `CHUNK_BYTES` at a time."""
        for write in self.writes:
            for extent, entries in chunks(write.target, write.entries):
                data = entries.to(write.target.dtype).contiguous().view(torch.uint8)
                store.put(write.file, extent._replace(offset=write.start + extent.offset), data)


def chunks(target: Tensor, entries: Tensor) -> Iterator[tuple[Extent, Tensor]]:
    """Cuts `entries`, which belong into `target`, into extents of the storage of which that is a view, and their parts.

    A part has the shape (rows, run). Only the shape, strides, offset and dtype of `target` count.
    """
    size, offset = target.element_size(), int(target.storage_offset())
    strides: tuple[int, ...] = target.stride()
    # Outermost first, as they lie in the file.
    order = sorted((d for d in range(target.ndim) if target.shape[d] != 1), key=lambda dim: -strides[dim])
    entries = entries.permute([*order, *(d for d in range(target.ndim) if target.shape[d] == 1)])
    outer, run = [(target.shape[dim], strides[dim]) for dim in order], 1
    while outer and outer[-1][1] == run:
        run *= outer.pop()[0]
    count, stride = 1, run
    if outer:
        count, stride = outer.pop()
        while outer and outer[-1][1] == stride * count:
            count *= outer.pop()[0]
    sizes = [length for length, _ in outer]
    if not math.prod(sizes) * count * run:
        return
    entries = entries.reshape(*sizes, count, run)  # a view: what is joined lies together in the file, and mostly here
    rows = max(1, CHUNK_BYTES // (run * size))
    columns = min(run, max(1, CHUNK_BYTES // size))
    for place in itertools.product(*map(range, sizes)):
        base = offset + sum(i * step for i, (_, step) in zip(place, outer, strict=True))
        for row, column in itertools.product(range(0, count, rows), range(0, run, columns)):
            part = entries[place][row : row + rows, column : column + columns]
            extent = Extent((base + row * stride + column) * size, part.shape[1] * size, stride * size, part.shape[0])
            yield extent, part
