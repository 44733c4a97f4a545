"""Linear layers of a gathered input that keep this rank's run of it until backward, and gather it again there.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2): the second all-gather overlaps with the gradient of the
input, and no rank keeps an activation of all tokens for the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Gather = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to gather a run; what it returns waits for the whole tensor."""

ATTRIBUTE = "_optimum_trn_gathered"


class Regathered:
    """The whole tensor in the backward pass: gathered once for the layers that read it, and kept until the last has."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather
        self.readers = 0
        self._under_way: Callable[[], Tensor] | None = None
        self._whole: Tensor | None = None

    def start(self, run: Tensor) -> None:
        """Have it under way."""
        if self._whole is None and self._under_way is None:
            self._under_way = self.gather(run)

    def take(self) -> Tensor:
        """The whole tensor, for one of its readers."""
        if self._under_way is not None:
            self._whole, self._under_way = self._under_way(), None
        whole = self._whole
        assert whole is not None
        self.readers -= 1
        if self.readers <= 0:
            self._whole = None
        return whole


class Gathered:
    """Of which run a tensor was gathered, so that the layers that read it need not keep it.

    It is an attribute of the tensor itself: whatever is computed from the tensor is kept as usual.
    """

    def __init__(self, run: Tensor, gather: Gather) -> None:
        self.gather = gather
        self._runs = {run.dtype: run.detach()}
        self._whole: dict[torch.dtype, Regathered] = {}

    def mark(self, whole: Tensor) -> None:
        """Let the layers that read `whole` know."""
        setattr(whole, ATTRIBUTE, self)

    def run(self, dtype: torch.dtype) -> Tensor:
        """The run as autocast makes it."""
        if dtype not in self._runs:
            self._runs[dtype] = next(iter(self._runs.values())).to(dtype)
        return self._runs[dtype]

    def whole(self, dtype: torch.dtype) -> Regathered:
        """What its readers share in the backward pass, which must not hold on to the run: autograd keeps that."""
        return self._whole.setdefault(dtype, Regathered(self.gather))


def gathered_from(input: Tensor) -> Gathered | None:
    """Of which run a tensor was gathered, if it was and a backward pass may need it."""
    return getattr(input, ATTRIBUTE, None) if torch.is_grad_enabled() else None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, which keeps a run of an input that was gathered."""
    gathered = gathered_from(input)
    if gathered is None or not weight.requires_grad:
        return F.linear(input, weight, bias)
    device = input.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(input, gathered.run(input.dtype), weight, bias, gathered.whole(input.dtype))
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, run: Tensor, weight: Tensor, bias: Tensor | None, whole: Regathered) -> Tensor:
        whole.readers += 1
        ctx.whole = whole
        output = F.linear(input, weight, bias)
        ctx.save_for_backward(run, weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run, weight = ctx.saved_tensors
        grad = grads[0]
        ctx.whole.start(run)
        rows = grad.flatten(0, -2)
        grad_input = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        grad_weight = rows.t() @ ctx.whole.take().flatten(0, -2)
        return grad_input, None, grad_weight, grad_bias, None
