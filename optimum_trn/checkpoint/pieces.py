"""Where a run of this rank's part of a tensor lies in the whole one, and the whole one as far as this rank holds it.

Every layout comes down to this: ZeRO-1 gives a rank runs of a flattened tensor, MiCS runs of its rows, and both are
parts of what a tensor-parallel rank has, whose placement says which pieces of the whole tensor these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..parallel import Placement
from .lazy import Box, LazyTensor


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that a run of a flattened tensor of this shape consists of, in order: at most two for a dimension."""
    if not shape:
        if start < stop:
            yield ()
        return
    row_size = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, row_size)
        if within == 0 and stop - start >= row_size:
            rows = (stop - start) // row_size
            yield ((row, row + rows), *((0, size) for size in shape[1:]))
            start += rows * row_size
        else:
            end = min(stop, (row + 1) * row_size)
            for box in boxes_of_run(shape[1:], within, within + end - start):
                yield ((row, row + 1), *box)
            start = end


def pieces(run: Tensor, start: int, placement: Placement, rank: int) -> Iterator[tuple[Box, Tensor, bool]]:
    """What a contiguous run holds, from element `start` on, of the flattened local tensor of `rank`.

    Gives boxes of the whole tensor, the views of `run` that are their entries, and whether `rank` is the first of
    those that hold the box. Padding is left out.
    """
    flat, position = run.view(-1), 0
    for box in boxes_of_run(placement.local_shape(rank), start, start + run.numel()):
        sizes = [stop - first for first, stop in box]
        view = flat.narrow(0, position, math.prod(sizes)).view(sizes)
        position += view.numel()
        dim = placement.dim
        if dim is None:
            yield box, view, rank == 0
            continue
        for piece, segment in zip(placement.ranges[rank], placement.segments(rank), strict=True):
            first, stop = max(box[dim][0], segment.offset), min(box[dim][1], segment.offset + piece.length)
            if piece.start is not None and first < stop:
                moved = (piece.start + first - segment.offset, piece.start + stop - segment.offset)
                part = view.narrow(dim, first - box[dim][0], stop - first)
                yield (*box[:dim], moved, *box[dim + 1 :]), part, segment.ranks[0] == rank


class Held(LazyTensor):
    """A whole tensor as far as this rank writes it: boxes and their entries.

    To copy it calls `write(target, entries)` for what it has of the box, where `target` is the part of the target that
    the entries belong to; the target may be on the meta device, where its place in a file is all there is to it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Sequence[tuple[Box, Tensor]],
        write: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.boxes = boxes
        self.write = write

    def copy_to(self, target: Tensor, box: Box) -> None:
        for held, values in self.boxes:
            into, entries = target, values
            for dim, ((start, stop), (first, last)) in enumerate(zip(box, held, strict=True)):
                begin, length = max(start, first), min(stop, last) - max(start, first)
                if length <= 0:
                    break
                into, entries = into.narrow(dim, begin - start, length), entries.narrow(dim, begin - first, length)
            else:
                self.write(into, entries)
