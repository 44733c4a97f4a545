"""Replicated modules that see sharded activations, such as a norm of each attention head."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from optimum_trn.parallel.collectives import copy_to_group
from optimum_trn.parallel.mesh import RankGroup


class SummedGradientForward:
    """The forward of one module instance, with its weights' gradients summed over a group.

    Every rank applies the same weight to other heads, so that its gradient is a part of the true one.  The sum has to
    happen inside the backward pass: done on `Parameter.grad` it would, under gradient accumulation, sum again what
    earlier micro-batches have summed already.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self.module = module
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The stock forward runs on a twin that shares all but the parameters; the module, its names and the identity of
        # its parameters stay as they are.
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__["_parameters"] = {
            name: None if parameter is None else copy_to_group(parameter, self.group.process_group)
            for name, parameter in self.module._parameters.items()
        }
        return twin.forward(*args, **kwargs)
