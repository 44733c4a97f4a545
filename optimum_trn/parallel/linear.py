"""Linear layers whose weight is cut over the ranks of a group: by output features (column) or input features (row)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.regather import linear


class ColumnParallelLinear(nn.Linear):
    """Each rank computes its own output features, from a replicated input of shape (..., in_features).

    `weight` (own features, in_features) and `bias` (own features) are local; `out_features` is that of the whole layer,
    which is what other libraries ask for.  With `copies_input` the layer sums the gradient of its input over the group
    itself; several layers with one input leave that to their block.
    """

    group: RankGroup
    copies_input: bool

    def forward(self, input: Tensor) -> Tensor:
        if self.copies_input:
            input = self.group.enter(input)
        return linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, columns of {self.group}"


class RowParallelLinear(nn.Linear):
    """Each rank multiplies its own input features, of shape (..., own features); the sum over the group is the output.

    `weight` (out_features, own features) is local, `in_features` is that of the whole layer, and `bias` (out_features)
    is whole and added once, after the sum.
    """

    group: RankGroup

    def forward(self, input: Tensor) -> Tensor:
        output = self.group.leave(F.linear(input, self.weight))
        return output if self.bias is None else output + self.group.parameter(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows of {self.group}"
