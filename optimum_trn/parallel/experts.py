"""Experts of a mixture whose intermediate width is cut over the ranks of a group."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from optimum_trn.parallel.collectives import copy_to_group, reduce_from_group
from optimum_trn.parallel.mesh import RankGroup

ADDED_ONCE = ("down_proj_bias",)
"""Parameters that every rank holds whole and whose effect must not count once per rank."""


class ShardedExperts:
    """The forward of one instance that holds the weights of all experts, each cut along its intermediate width.

    Hidden states and routing weights are whole on every rank and get the sum of their partial gradients, the output is
    the sum of the partial outputs.  The bias of the output is added by every rank in equal parts, since it is weighted
    by the router before the sum.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self.module = module
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        process_group = self.group.process_group

        def enter(value: Any) -> Any:
            floating = isinstance(value, Tensor) and torch.is_floating_point(value)
            return copy_to_group(value, process_group) if floating else value

        # The stock forward, on a twin that shares all but the bias that is added in parts.
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__["_parameters"] = {
            name: parameter
            if parameter is None or name not in ADDED_ONCE
            else copy_to_group(parameter, process_group) / self.group.size
            for name, parameter in self.module._parameters.items()
        }
        output = twin.forward(*map(enter, args), **{name: enter(value) for name, value in kwargs.items()})
        return reduce_from_group(output, process_group)
