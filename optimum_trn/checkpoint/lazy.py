"""Tensors that are not there yet, which transformers' own weight conversions may cut and join before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError

Box = tuple[tuple[int, int], ...]
"""From where to where, for each dimension."""


class LazyTensor:
    """A tensor of a known shape that gives any box of itself, and nothing before it is asked to.

    It takes the place of a tensor in the functions of torch that only move entries (`OPERATIONS`), and in those methods
    that conversions call; the result is lazy, too.  Raises `UnsupportedModelError` for whatever else is done to it.
    """

    shape: torch.Size
    dtype: torch.dtype

    def copy_to(self, target: Tensor, box: Box) -> None:
        """Write a box of the entries into a tensor of its shape, on any device."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Tensor:
        """Its entries, or those in slices without a step of its first dimensions, on the CPU."""
        slices = () if index is ... else index if isinstance(index, tuple) else (index,)
        rest = (slice(None),) * (len(self.shape) - len(slices))
        box = tuple(one.indices(size)[:2] for one, size in zip((*slices, *rest), self.shape, strict=True))
        target = torch.empty([stop - start for start, stop in box], dtype=self.dtype)
        self.copy_to(target, box)
        return target

    def size(self, dim: int) -> int:
        """The length of one dimension."""
        return self.shape[dim]

    def contiguous(self) -> LazyTensor:
        """Itself: it has no layout in memory."""
        return self

    def squeeze(self, dim: int) -> LazyTensor:
        """Without a dimension of length 1; itself if it has another length."""
        if self.shape[dim] != 1:
            return self
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return Viewed(self, shape, lambda t: t.unsqueeze(dim), lambda box: (*box[:dim], (0, 1), *box[dim:]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in OPERATIONS:
            raise _unsupported(getattr(function, "__name__", str(function)))
        return OPERATIONS[function](*args, **(kwargs or {}))


def _unsupported(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"transformers computes ({name}) with the weights in this model's stock files, which cannot be done slice by "
        f"slice. Load the checkpoint with transformers and save it with save_original_format=False; save a sharded "
        f"model that way, too."
    )


class Joined(LazyTensor):
    """Tensors one after the other along a dimension."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        length = sum(part.shape[dim] for part in parts)
        self.shape = torch.Size((*parts[0].shape[:dim], length, *parts[0].shape[dim + 1 :]))
        self.dtype = parts[0].dtype
        self.parts = parts
        self.dim = dim

    def copy_to(self, target: Tensor, box: Box) -> None:
        dim, (start, stop), offset = self.dim, box[self.dim], 0
        for part in self.parts:
            first, last = max(start, offset), min(stop, offset + part.shape[dim])
            if first < last:
                inner = (*box[:dim], (first - offset, last - offset), *box[dim + 1 :])
                part.copy_to(target.narrow(dim, first - start, last - first), inner)
            offset += part.shape[dim]


class Viewed(LazyTensor):
    """Another tensor in another shape: how a target of this shape looks to it, and where a box of this one is in it."""

    def __init__(
        self, whole: LazyTensor, shape: Sequence[int], target: Callable[[Tensor], Tensor], box: Callable[[Box], Box]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = whole.dtype
        self.whole = whole
        self.target = target
        self.box = box

    def copy_to(self, target: Tensor, box: Box) -> None:
        self.whole.copy_to(self.target(target), self.box(box))


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return Viewed(tensor, shape, lambda t: t.squeeze(dim), lambda box: (*box[:dim], *box[dim + 1 :]))


def _narrow(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    def moved(box: Box) -> Box:
        first, last = box[dim]
        return (*box[:dim], (first + start, last + start), *box[dim + 1 :])

    return Viewed(tensor, (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]), lambda t: t, moved)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    shape = [tensor.shape[dim] for dim in order]
    return Viewed(tensor, shape, lambda t: t.transpose(dim0, dim1), lambda box: tuple(box[dim] for dim in order))


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= len(tensors[0].shape) + 1
    return Joined([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return Joined(tensors, dim % len(tensors[0].shape))


def _split(tensor: LazyTensor, sizes: Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim %= len(tensor.shape)
    ends = accumulate(sizes)
    return tuple(_narrow(tensor, dim, end - size, size) for end, size in zip(ends, sizes, strict=True))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    length = tensor.shape[dim]
    size = -(-length // chunks)
    return _split(tensor, [min(size, length - start) for start in range(0, length, size)], dim)


OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
