"""Brings a sharded tensor to the first rank of its group, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel import Placement
from ..parallel.mics import whole
from .lazy import Box, LazyTensor

BLOCK_BYTES = 32 * 2**20  # of the whole tensor's rows at a time: neither HBM nor the host need room for more


class Gathered(LazyTensor):
    """The global tensor of a shard; to copy a box of it is a collective over `group`.

    The box arrives on the first rank of the group; the other ranks give a target on the meta device.
    """

    def __init__(self, local: Tensor, placement: Placement, group: dist.ProcessGroup | None) -> None:
        self.shape = torch.Size(placement.global_shape)
        self.dtype = local.dtype
        self.local = local.detach()
        self.placement = placement
        self.group = group

    def copy_to(self, target: Tensor, box: Box) -> None:
        sharded, part = self.placement.dim, whole(self.local)
        for dim, (start, stop) in enumerate(box):
            if dim != sharded:
                part = part.narrow(dim, start, stop - start)
        if sharded is None:
            self._send(part, 0, target)
            return
        (start, stop), position = box[sharded], 0
        for owner, offset, length in runs(self.placement):
            first, last = max(start, position), min(stop, position + length)
            if first < last:
                run = part.narrow(sharded, offset + first - position, last - first)
                self._send(run, owner, target.narrow(sharded, first - start, last - first))
            position += length

    def _send(self, part: Tensor, owner: int, target: Tensor) -> None:
        """`part` of rank `owner` goes into the first rank's target; its shape is the same on every rank."""
        if owner == 0:
            if is_first(self.group):
                target.copy_(part)
            return
        assert self.group is not None
        if is_first(self.group):
            received = torch.empty_like(part, memory_format=torch.contiguous_format)
            dist.recv(received, group=self.group, group_src=owner)
            target.copy_(received)
        elif dist.get_rank(self.group) == owner:
            dist.send(part.contiguous(), group=self.group, group_dst=0)


class OfStage(LazyTensor):
    """A tensor that the ranks of one pipeline stage can gather; its boxes go on to the first rank of the first stage.

    To copy one is a collective over the stages, too, all of which know the shape.
    """

    def __init__(self, tensor: LazyTensor, owner: int, stages: dist.ProcessGroup, device: torch.device) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.tensor = tensor
        self.owner = owner
        self.stages = stages
        self.device = device

    def copy_to(self, target: Tensor, box: Box) -> None:
        rank = dist.get_rank(self.stages)
        if rank == self.owner:
            self.tensor.copy_to(target, box)
        if self.owner == 0 or target.is_meta:
            return
        if rank == self.owner:
            dist.send(target.to(self.device).contiguous(), group=self.stages, group_dst=0)
        elif rank == 0:
            received = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            dist.recv(received, group=self.stages, group_src=self.owner)
            target.copy_(received)


def blocks(tensor: LazyTensor, group: dist.ProcessGroup | None) -> Iterator[Tensor | None]:
    """Blocks along dimension 0 of a tensor made of gathered ones, on the CPU of the first rank; Nones elsewhere.

    A collective over `group`; every rank must exhaust it.
    """
    first = is_first(group)
    length, row = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, torch.Size())
    rows = max(1, BLOCK_BYTES // max(1, tensor.dtype.itemsize * row.numel()))
    for start in range(0, length, rows):
        stop = min(length, start + rows)
        box = ((start, stop), *((0, size) for size in row)) if tensor.shape else ()
        block = torch.empty([end - begin for begin, end in box], dtype=tensor.dtype, device="cpu" if first else "meta")
        tensor.copy_to(block, box)
        yield block if first else None


def runs(placement: Placement) -> list[tuple[int, int, int]]:
    """(rank, start in its local tensor, length) of the shards that make up the sharded dimension, in global order.

    Of replicas the first is taken; padding is left out.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for rank, pieces in enumerate(placement.ranges):
        offsets = accumulate((piece.length for piece in pieces), initial=0)
        for piece, offset in zip(pieces, offsets, strict=False):
            if piece.start is not None:
                found.setdefault(piece.start, (rank, offset, piece.length))
    return [found[start] for start in sorted(found)]


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the one that tensors are brought to."""
    return group is None or dist.get_rank(group) == 0
