"""A norm of any kind whose features are cut over the ranks: computed on all, of which each rank keeps its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from optimum_trn.parallel.collectives import copy_to_group, gather_from_group
from optimum_trn.parallel.mesh import RankGroup


class GatheredNorm:
    """The forward of one instance with whole parameters, on an input of shape (..., features / group.size).

    Costs an all-gather of the activations; `ShardedRMSNorm` does without for the root mean square.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self.module = module
        self.group = group

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        process_group = self.group.process_group
        # Each rank goes on with its own part, so that the gradients of the whole are partial on every rank.
        whole = copy_to_group(gather_from_group(hidden_states, process_group, dim=-1), process_group)
        twin = object.__new__(type(self.module))
        twin.__dict__ = copy.copy(self.module.__dict__)
        del twin.__dict__["forward"]
        twin.__dict__["_parameters"] = {
            name: parameter if parameter is None else copy_to_group(parameter, process_group)
            for name, parameter in self.module._parameters.items()
        }
        width = hidden_states.shape[-1]
        return twin.forward(whole, *args, **kwargs).narrow(-1, self.group.rank * width, width)
