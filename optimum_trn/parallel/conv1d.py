"""transformers' Conv1D, a linear layer with a weight of shape (in, out), cut over the ranks of a group."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from optimum_trn.parallel.mesh import RankGroup


class ColumnParallelConv1D(Conv1D):
    """Each rank computes its own output features, as `ColumnParallelLinear` does; `nf` is local."""

    group: RankGroup
    copies_input: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.copies_input:
            x = self.group.enter(x)
        return F.linear(x, self.weight.t(), self.bias)


class RowParallelConv1D(Conv1D):
    """Each rank multiplies its own input features, as `RowParallelLinear` does; `nx` is local, the bias is whole."""

    group: RankGroup

    def forward(self, x: Tensor) -> Tensor:
        return self.group.leave(F.linear(x, self.weight.t())) + self.group.parameter(self.bias)
