"""Cuts: which part of one dimension each rank of a group holds, as data; all ranks get equally much.

Static graphs need equal shapes on all ranks, so that what the ranks do not divide is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from optimum_trn.errors import PlanError


class Piece(NamedTuple):
    """A run of the global dimension: `length` entries from `start`, or as many zeros of padding if `start` is None."""

    start: int | None
    length: int


Pieces = tuple[Piece, ...]


class HeadSlot(NamedTuple):
    """One key-value head of a rank and the query heads that it serves there; None for what is padding."""

    key: int | None
    queries: tuple[int | None, ...]


@dataclass(frozen=True)
class HeadLayout:
    """Where the heads of grouped-query attention are computed, when `num_kv_heads` serve `num_heads` equally.

    Every rank has equally many key-value slots, and every key-value slot equally many query slots, as stock forwards
    expect; slots may be empty.  Where there are fewer key-value heads than ranks, `copies` ranks hold the same one and
    share its queries among them.  `PlanError` if the heads are not such groups.
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise PlanError(f"{self.num_kv_heads} key-value heads cannot serve {self.num_heads} query heads equally.")

    @property
    def copies(self) -> int:
        """How many ranks hold the same key-value head: as many as shorten each one's share of its queries."""
        group = self.num_heads // self.num_kv_heads
        most = max(1, min(self.num_ranks // self.num_kv_heads, group))
        return -(-group // -(-group // most))

    @property
    def keys_per_rank(self) -> int:
        """Key-value heads of a rank, padding included."""
        return -(-self.num_kv_heads * self.copies // self.num_ranks)

    @property
    def queries_per_key(self) -> int:
        """Query heads that each of them serves, padding included."""
        return -(-self.num_heads // self.num_kv_heads // self.copies)

    def slots(self, rank: int) -> list[HeadSlot]:
        """What `rank` computes, in its order."""
        group, share = self.num_heads // self.num_kv_heads, self.queries_per_key
        result = []
        for slot in range(rank * self.keys_per_rank, (rank + 1) * self.keys_per_rank):
            key, part = divmod(slot, self.copies)
            if key >= self.num_kv_heads:
                result.append(HeadSlot(None, (None,) * share))
                continue
            places = range(part * share, (part + 1) * share)
            result.append(HeadSlot(key, tuple(key * group + place if place < group else None for place in places)))
        return result

    def queries(self, rank: int) -> list[int | None]:
        """The query heads of `rank`, in its order."""
        return [query for slot in self.slots(rank) for query in slot.queries]

    def positions(self) -> list[int]:
        """Where each query head of the stock model stands when the ranks' heads are put one after the other."""
        every = [query for rank in range(self.num_ranks) for query in self.queries(rank)]
        return [every.index(head) for head in range(self.num_heads)]


@dataclass(frozen=True)
class Heads:
    """A run of a dimension with `width` entries for each head, cut as a `HeadLayout` of the same numbers says.

    There is an entry for each query head ("queries"), for each key-value head ("keys"), or each key-value head has its
    queries, its key and its value ("groups").
    """

    num_heads: int
    num_kv_heads: int
    width: int
    of: Literal["queries", "keys", "groups"] = "queries"

    @property
    def length(self) -> int:
        """How many entries the run has."""
        counts = {
            "queries": self.num_heads,
            "keys": self.num_kv_heads,
            "groups": self.num_heads + 2 * self.num_kv_heads,
        }
        return counts[self.of] * self.width

    def pieces(self, start: int, num_ranks: int) -> list[list[Piece]]:
        """What each rank holds of the run, which begins at `start`."""
        layout = HeadLayout(self.num_heads, self.num_kv_heads, num_ranks)
        group = self.num_heads // self.num_kv_heads
        result = []
        for rank in range(num_ranks):
            runs: list[list[int | None]] = [[]]
            for key, queries in layout.slots(rank):
                if self.of == "queries":
                    runs[-1] += queries
                elif self.of == "keys":
                    runs[-1].append(key)
                else:
                    runs[-1] += [None if query is None else query + 2 * (query // group) for query in queries]
                    if layout.copies > 1:  # other ranks hold the key and the value, but not the queries
                        runs.append([])
                    runs[-1] += [None if key is None else key * (group + 2) + group + part for part in range(2)]
            result.append([piece for heads in runs for piece in self._merged(start, heads)])
        return result

    def _merged(self, start: int, heads: Sequence[int | None]) -> list[Piece]:
        """The entries of consecutive heads, in as few pieces as possible."""
        pieces: list[Piece] = []
        for head in heads:
            piece = Piece(None if head is None else start + head * self.width, self.width)
            if pieces and piece.start == (None if pieces[-1].start is None else sum(pieces[-1])):  # type: ignore[arg-type]
                pieces[-1] = Piece(pieces[-1].start, pieces[-1].length + piece.length)
            else:
                pieces.append(piece)
        return pieces


Block = int | Heads
"""A run of a dimension that is cut on its own: a number of entries, in equal contiguous shards, or heads."""


def cut(length: int, blocks: Sequence[Block], num_ranks: int) -> tuple[Pieces, ...]:
    """What each rank holds of a dimension that consists of consecutive `blocks`, or of one if there are none.

    Where `num_ranks` does not divide a block, zeros fill up the last ranks.  `PlanError` if the blocks have another
    length together.
    """
    blocks = tuple(blocks) or (length,)
    lengths = [block if isinstance(block, int) else block.length for block in blocks]
    if sum(lengths) != length:
        raise PlanError(f"blocks of {lengths} do not make a dimension of {length}.")
    ranges: list[list[Piece]] = [[] for _ in range(num_ranks)]
    start = 0
    for block, block_length in zip(blocks, lengths, strict=True):
        own = _even(start, block, num_ranks) if isinstance(block, int) else block.pieces(start, num_ranks)
        for pieces, more in zip(ranges, own, strict=True):
            pieces += more
        start += block_length
    return tuple(tuple(pieces) for pieces in ranges)


def _even(start: int, length: int, num_ranks: int) -> list[list[Piece]]:
    share = -(-length // num_ranks)
    result = []
    for rank in range(num_ranks):
        offset = min(rank * share, length)
        real = min(share, length - offset)
        parts = (Piece(start + offset, real), Piece(None, share - real))
        result.append([piece for piece in parts if piece.length])
    return result
