"""Brings a sharded tensor to the first rank of its group, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel import Placement

BLOCK_BYTES = 32 * 2**20  # of the whole tensor's rows at a time: neither HBM nor the host need room for more


def gathered_blocks(local: Tensor, placement: Placement, group: dist.ProcessGroup | None) -> Iterator[Tensor | None]:
    """The global tensor on the CPU of the group's first rank, in blocks along dimension 0; as many Nones elsewhere.

    A collective over `group`, one transfer for each shard of a block; every rank must exhaust it.
    """
    if not placement.global_shape:
        yield _fetch(local.reshape(1), 0, group)
        return
    row_bytes = max(1, local.element_size() * torch.Size(placement.global_shape[1:]).numel())
    rows = max(1, BLOCK_BYTES // row_bytes)
    if placement.dim == 0:
        for owner, start, length in runs(placement):
            for offset in range(start, start + length, rows):
                part = local.narrow(0, offset, min(rows, start + length - offset))
                yield _fetch(part, owner, group)
        return
    for offset in range(0, placement.global_shape[0], rows):
        part = local.narrow(0, offset, min(rows, placement.global_shape[0] - offset))
        if placement.dim is None:
            yield _fetch(part, 0, group)
            continue
        whole = part.new_empty((part.shape[0], *placement.global_shape[1:]), device="cpu") if _first(group) else None
        position = 0
        for owner, start, length in runs(placement):
            piece = _fetch(part.narrow(placement.dim, start, length), owner, group)
            if whole is not None and piece is not None:
                whole.narrow(placement.dim, position, length).copy_(piece)
            position += length
        yield whole


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


def _first(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _fetch(part: Tensor, owner: int, group: dist.ProcessGroup | None) -> Tensor | None:
    """`part` of rank `owner`, on the CPU of the first rank; its shape is the same on every rank."""
    part = part.detach()
    if owner == 0:
        return part.cpu() if _first(group) else None
    assert group is not None
    if _first(group):
        received = torch.empty_like(part, memory_format=torch.contiguous_format)
        dist.recv(received, group=group, group_src=owner)
        return received.cpu()
    if dist.get_rank(group) == owner:
        dist.send(part.contiguous(), group=group, group_dst=0)
    return None
