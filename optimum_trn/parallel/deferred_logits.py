"""Logits that a head has not computed yet: a loss may compute them part by part, anything else gets them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

_FACTS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
}
"""What is known of them without computing them."""


class DeferredLogits(torch.Tensor):
    """The logits (..., tokens of this rank) of `hidden` (..., features) with `weight` and `bias`, when they are needed.

    It takes no memory.  Whatever operator is applied to it works on the product, which is made once, with its gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    _product: Tensor | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        """What takes the place of `torch.nn.functional.linear(hidden, weight, bias)`."""
        device = hidden.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        shape = (*hidden.shape[:-1], weight.shape[0])
        with unset_fake_temporarily():  # a fake can be no other subclass; nothing is computed with this one
            logits = torch.empty(1, dtype=dtype, device=hidden.device).expand(shape).as_subclass(DeferredLogits)
        with torch._C.DisableTorchFunctionSubclass():
            logits.hidden, logits.weight, logits.bias, logits._product = hidden, weight, bias, None
        return logits

    def computed(self) -> Tensor:
        """The logits as a plain tensor."""
        if self._product is None:
            self._product = F.linear(self.hidden, self.weight, self.bias)
        return self._product

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return func(*_computed(args), **_computed(kwargs or {}))


def _computed(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.computed()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(_computed, value))
    return {key: _computed(item) for key, item in value.items()} if isinstance(value, Mapping) else value
