"""A root-mean-square norm whose features are cut over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimum_trn.parallel.collectives import copy_to_group, reduce_from_group
from optimum_trn.parallel.mesh import RankGroup


class ShardedRMSNorm:
    """The forward of one RMS norm instance (Zhang and Sennrich 2019, arXiv:1910.07467) with a local weight.

    The input (..., features / group.size, rounded up) is normalised by the root mean square over all `features`,
    computed in float32 (float64 for float64 inputs) from one all-reduced sum of squares for each position.
    """

    def __init__(self, module: nn.Module, group: RankGroup, features: int) -> None:
        self.module = module
        self.group = group
        self.features = features

    @staticmethod
    def epsilon_of(module: nn.Module) -> float | None:
        """What the stock module adds to the mean square; None if it is no RMS norm."""
        return getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)

    def __call__(self, hidden_states: Tensor) -> Any:
        epsilon = self.epsilon_of(self.module)
        assert epsilon is not None
        weight = self.module.get_parameter("weight")
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        process_group = self.group.process_group
        # Each rank's features depend on the sum, so that its gradient is summed over the ranks as well.
        squares = copy_to_group(reduce_from_group(wide.pow(2).sum(-1, keepdim=True), process_group), process_group)
        normalised = wide * torch.rsqrt(squares / self.features + epsilon)
        return (weight * normalised).to(hidden_states.dtype)
