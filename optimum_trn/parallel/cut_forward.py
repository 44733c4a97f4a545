"""The stock forward of one module on parameters that are cut, and what makes the sum over the ranks of it right."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sharding import Placement


class CutForward:
    """Runs the stock forward of `module` on local parameters, buffers and numbers.

    With `enters`, what comes in is whole and gets the sum of its partial gradients; with `leaves`, the output is
    partial and is summed.  `added_once` are parameters that every rank holds whole and whose effect must not count once
    per rank; `buffers` lie as their placements say, and are narrowed from the whole ones at every call.
    """

    def __init__(
        self,
        module: nn.Module,
        group: RankGroup,
        enters: bool = False,
        leaves: bool = False,
        added_once: Sequence[str] = (),
        buffers: Mapping[str, Placement] | None = None,
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.group = group
        self.enters = enters
        self.leaves = leaves
        self.added_once = tuple(added_once)
        self.buffers = dict(buffers or {})
        self.numbers = dict(numbers or {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__.update(self.numbers)
        twin.__dict__["_parameters"] = {
            name: self.group.enter(parameter) / self.group.size
            if parameter is not None and name in self.added_once
            else parameter
            for name, parameter in self.module._parameters.items()
        }
        twin.__dict__["_buffers"] = {name: self._local(name, buffer) for name, buffer in self.module._buffers.items()}
        if self.enters:
            args = tuple(map(self._enter, args))
            kwargs = {name: self._enter(value) for name, value in kwargs.items()}
        output = twin.forward(*args, **kwargs)
        if not self.leaves:
            return output
        return (self.group.leave(output[0]), *output[1:]) if isinstance(output, tuple) else self.group.leave(output)

    def _enter(self, value: Any) -> Any:
        return self.group.enter(value) if isinstance(value, Tensor) and torch.is_floating_point(value) else value

    def _local(self, name: str, buffer: Tensor | None) -> Tensor | None:
        placement = self.buffers.get(name)
        if buffer is None or placement is None or placement.dim is None:
            return buffer
        pieces = placement.pieces(self.group.rank)
        if len(pieces) == 1 and pieces[0].start is not None:
            start, length = pieces[0].start, pieces[0].length
            return buffer.narrow(placement.dim, start, length)  # a view, so that running statistics are kept
        return placement.shard(buffer, self.group.rank)
