"""Gradient buckets: which parameters share one flat buffer, and which part of it belongs to which rank; pure layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Capacity of a bucket: the default of torch's DistributedDataParallel (`bucket_cap_mb=25`)."""


class Span(NamedTuple):
    """A run of one flattened parameter, and where it lies: in the chunk of `rank`, from `offset` on (in elements)."""

    name: str
    start: int
    length: int
    rank: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are communicated together, in a buffer of `num_ranks` chunks of equal length.

    Their gradients may have another one, `grad_dtype`.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    chunk: int
    dtype: torch.dtype
    grad_dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, each once."""
        return tuple(dict.fromkeys(span.name for span in self.spans))

    def part(self, flat: Tensor, span: Span) -> Tensor:
        """Where `span` lies in the whole buffer: a view of shape (length,)."""
        return flat.narrow(0, span.rank * self.chunk + span.offset, span.length)


Layout = Callable[[Sequence[tuple[str, int]], int], tuple[list[Span], int]]
"""Gives the spans of parameters of these lengths, and the length of a chunk, for a number of ranks."""


def by_elements(lengths: Sequence[tuple[str, int]], num_ranks: int) -> tuple[list[Span], int]:
    """Equal runs of the concatenated parameters, whose borders may run through a parameter: fewer than
    `num_ranks` elements of padding."""
    chunk = -(-sum(length for _, length in lengths) // num_ranks)
    spans, position = [], 0
    for name, length in lengths:
        start = 0
        while start < length:
            rank, offset = divmod(position, chunk)
            run = min(length - start, chunk - offset)
            spans.append(Span(name, start, run, rank, offset))
            start, position = start + run, position + run
    return spans, chunk


class ByParameters:
    """Whole parameters, each to the rank that has the fewest elements so far, over all buckets of one model."""

    def __init__(self) -> None:
        self.owned: list[int] = []

    def __call__(self, lengths: Sequence[tuple[str, int]], num_ranks: int) -> tuple[list[Span], int]:
        self.owned = self.owned or [0] * num_ranks
        filled, spans = [0] * num_ranks, []
        for name, length in sorted(lengths, key=lambda item: -item[1]):
            rank = min(range(num_ranks), key=lambda rank: (self.owned[rank], rank))
            spans.append(Span(name, 0, length, rank, filled[rank]))
            filled[rank] += length
            self.owned[rank] += length
        return spans, max(filled)


def make_buckets(
    parameters: Mapping[str, nn.Parameter], num_ranks: int, layout: Layout, capacity: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Cuts `parameters` into buckets of at most `capacity` bytes of gradients, or of one parameter.

    In reverse order, the last parameter first, which is about the order in which backward computes the gradients.
    A bucket holds parameters of one dtype, and gradients of one: that of `Tensor.grad_dtype`.
    """

    buckets: list[Bucket] = []

    def close(dtypes: tuple[torch.dtype, torch.dtype], lengths: list[tuple[str, int]]) -> None:
        spans, chunk = layout(lengths, num_ranks)
        buckets.append(Bucket(tuple(spans), num_ranks, chunk, *dtypes))

    filling: dict[tuple[torch.dtype, torch.dtype], list[tuple[str, int]]] = {}
    for name, parameter in reversed(list(parameters.items())):
        dtypes = (parameter.dtype, parameter.grad_dtype or parameter.dtype)
        lengths = filling.get(dtypes, [])
        if lengths and (sum(n for _, n in lengths) + parameter.numel()) * dtypes[1].itemsize > capacity:
            close(dtypes, filling.pop(dtypes))
        filling.setdefault(dtypes, []).append((name, parameter.numel()))
    for dtypes, lengths in filling.items():
        close(dtypes, lengths)
    return tuple(buckets)


def spans_of(buckets: Sequence[Bucket], rank: int) -> list[Span]:
    """What `rank` owns of all buckets."""
    return [span for span in itertools.chain.from_iterable(bucket.spans for bucket in buckets) if span.rank == rank]
