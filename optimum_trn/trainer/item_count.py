"""Whether a loss makes use of the number of items that Trainer hands to it: seen once, by watching it compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class UseOf(TorchFunctionMode):
    """While active, notes whether any operation takes `tensor`; `seen` says so afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Attributes are read by whoever only looks at the tensor: its shape, its device.
        if getattr(func, "__name__", "") != "__get__":
            self.seen = self.seen or any(value is self.tensor for value in (*args, *kwargs.values()))
        return func(*args, **kwargs)
