"""How one parameter lies on the ranks of a group, as data: pure functions of tensors, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block, Piece, Pieces, cut


class Segment(NamedTuple):
    """A run of the local dimension, and the ranks that hold the same values; no ranks at all if it is padding."""

    offset: int
    length: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where each rank's local tensor comes from in the global one.

    `ranges[rank]` lists the pieces of dimension `dim` that rank holds, concatenated in this order.  Ranks with the same
    pieces are replicas of each other.  `dim` None, with empty `ranges`, means that all ranks hold the whole tensor.
    """

    global_shape: tuple[int, ...]
    num_ranks: int
    dim: int | None = None
    ranges: tuple[Pieces, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ranges) != (0 if self.dim is None else self.num_ranks):
            raise PlanError(f"{len(self.ranges)} ranges were given for {self.num_ranks} ranks along dim {self.dim}.")
        lengths = {sum(piece.length for piece in pieces) for pieces in self.ranges}
        if len(lengths) > 1:
            raise PlanError(f"the local shapes must be equal on all ranks, not of lengths {sorted(lengths)}.")

    @classmethod
    def replicate(cls, shape: Sequence[int], num_ranks: int) -> Placement:
        """The whole tensor on every rank."""
        return cls(tuple(shape), num_ranks)

    @classmethod
    def split(cls, shape: Sequence[int], num_ranks: int, dim: int, blocks: Sequence[Block] = ()) -> Placement:
        """Shards of equal shape along `dim`, one a rank, filled up with zeros where `num_ranks` does not divide it.

        If `dim` consists of consecutive `blocks`, as in a fused projection, every rank gets its shard of each of them;
        `PlanError` if they do not.
        """
        return cls(tuple(shape), num_ranks, dim, cut(shape[dim], blocks, num_ranks))

    def pieces(self, rank: int) -> Pieces:
        """What `rank` holds of dimension `dim`, for lazy reads; a single full piece of dimension 0 if replicated."""
        if self.dim is None:
            return (Piece(0, self.global_shape[0]),) if self.global_shape else ()
        return self.ranges[rank]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the tensor on `rank`, padding included."""
        if self.dim is None:
            return self.global_shape
        length = sum(piece.length for piece in self.ranges[rank])
        return (*self.global_shape[: self.dim], length, *self.global_shape[self.dim + 1 :])

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The pieces of a sharded dimension on `rank`, where they are in its local tensor, and who else holds them."""
        result, offset = [], 0
        for piece in self.ranges[rank]:
            holders = [other for other in range(self.num_ranks) if piece in self.ranges[other]]
            result.append(Segment(offset, piece.length, () if piece.start is None else tuple(holders)))
            offset += piece.length
        return tuple(result)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """The local tensor of `rank`, in storage of its own, so that the full one can be freed."""
        if tuple(full.shape) != self.global_shape:
            raise PlanError(f"a tensor of shape {tuple(full.shape)} was given for one of shape {self.global_shape}.")
        if self.dim is None:
            return full.clone()
        parts = [
            full.narrow(self.dim, piece.start, piece.length)
            if piece.start is not None
            else full.new_zeros(*full.shape[: self.dim], piece.length, *full.shape[self.dim + 1 :])
            for piece in self.ranges[rank]
        ]
        return torch.cat(parts, dim=self.dim)

    def unshard(self, local_tensors: Sequence[Tensor]) -> Tensor:
        """The global tensor from those of all ranks, in rank order; padding is dropped, the first replica is taken."""
        if len(local_tensors) != self.num_ranks:
            raise PlanError(f"{len(local_tensors)} local tensors were given for a placement on {self.num_ranks} ranks.")
        if self.dim is None:
            return local_tensors[0].clone()
        full = local_tensors[0].new_empty(self.global_shape)
        for rank in reversed(range(self.num_ranks)):
            offset = 0
            for start, length in self.ranges[rank]:
                if start is not None:
                    full.narrow(self.dim, start, length).copy_(local_tensors[rank].narrow(self.dim, offset, length))
                offset += length
        return full
