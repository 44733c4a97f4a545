"""How a file is spread over stores: cut into pieces along its layers, each piece on one store, or on several."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import StoreError

STRATEGIES = ("application", "horizontal", "vertical", "hybrid")
"""One store for each file; whole layers in turn; one slice of the file for each store; a slice of each layer for each.

With hybrid every layer comes over all links at once, and all stores send the same: the first layer is there soonest.
"""
ALIGNMENT = 512
SMALL = 64 << 10  # runs that are not worth a message from each store


class Cut(NamedTuple):
    """A piece of a file and the store that holds it."""

    offset: int
    length: int
    store: int


def cut(runs: Sequence[tuple[int, int]], stores: int, strategy: str, first: int = 0) -> list[Cut]:
    """The pieces of a file whose layers are `runs` (offset, length), which follow each other without gaps.

    `first` is the store that begins, so that the small pieces of many files are spread, too.  Raises `StoreError` for
    an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise StoreError(f"{strategy!r} is no way to spread a file: take one of {', '.join(STRATEGIES)}.")
    if strategy == "application":
        return [Cut(offset, length, first % stores) for offset, length in runs]
    if strategy == "horizontal":
        return [Cut(offset, length, (first + index) % stores) for index, (offset, length) in enumerate(runs)]
    if strategy == "vertical":
        size = sum(length for _, length in runs)
        bounds = [size * index // stores for index in range(stores + 1)]
        slices = zip(bounds, bounds[1:], strict=False)
        return [Cut(start, end - start, (first + i) % stores) for i, (start, end) in enumerate(slices) if start < end]
    pieces: list[Cut] = []
    for index, (offset, length) in enumerate(runs):
        if length < SMALL:
            pieces.append(Cut(offset, length, (first + index) % stores))
            continue
        ends = [length * (i + 1) // stores // ALIGNMENT * ALIGNMENT for i in range(stores - 1)] + [length]
        starts = [0, *ends[:-1]]
        pieces += [
            Cut(offset + start, end - start, (first + index + i) % stores)
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
            if start < end
        ]
    return pieces


def layer_runs(header: bytes, size: int) -> list[tuple[int, int]]:
    """The runs of a safetensors file of `size` bytes: its header, then consecutive tensors of the same layer each.

    `header` is the beginning of the file, up to the end of its JSON.  `StoreError` if it is not one.
    """
    try:
        entries = json.loads(header[8:])
        spans = sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]), layer_of(name))
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StoreError(f"This is no safetensors file: {error!r}.") from None
    runs = [(0, len(header))]
    layer, position = None, len(header)
    for start, end, of in spans:
        if len(header) + start != position:
            raise StoreError(f"This safetensors file has a gap before byte {len(header) + start}: it is damaged.")
        if of == layer:
            runs[-1] = (runs[-1][0], runs[-1][1] + end - start)
        else:
            runs.append((position, end - start))
        layer, position = of, len(header) + end
    if position != size:
        raise StoreError(f"This safetensors file has {size} bytes and its header announces {position}: it is damaged.")
    return [run for run in runs if run[1]]


def layer_of(name: str) -> str:
    """What a tensor of this name moves with: its block of the stack ("model.layers.3"), or else its module."""
    block = re.match(r"(.*?\.\d+)\.", name)
    return block.group(1) if block else name.rpartition(".")[0]
