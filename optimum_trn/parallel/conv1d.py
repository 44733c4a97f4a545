"""transformers' Conv1D, a linear layer with a weight of shape (in, out), cut over the ranks of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.regather import linear


class ParallelConv1D(Conv1D):
    """A layer whose `weight` is local, while `nx` and `nf` are those of the whole layer."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name == "weight":
            # PEFT reads the sizes of a Conv1D off its weight, and those of a sharded one here, as DeepSpeed names it.
            value.ds_shape = (self.nx, self.nf)
        return value


class ColumnParallelConv1D(ParallelConv1D):
    """Each rank computes its own output features, as `ColumnParallelLinear` does."""

    group: RankGroup
    copies_input: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.copies_input:
            x = self.group.enter(x)
        return linear(x, self.weight.t(), self.bias)


class RowParallelConv1D(ParallelConv1D):
    """Each rank multiplies its own input features, as `RowParallelLinear` does; the bias is whole."""

    group: RankGroup

    def forward(self, x: Tensor) -> Tensor:
        return self.group.leave(F.linear(x, self.weight.t())) + self.group.parameter(self.bias)
