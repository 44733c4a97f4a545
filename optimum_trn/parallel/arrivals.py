"""Parameters whose new values are still under way: the first operation that reads one waits for them.

Where the reader is does not matter: the forward of the module that owns the parameter or of another one, a functional
call, a tied weight, a state dict, a copy, or someone who holds the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Arrival:
    """The values of some parameters, which are there once `work` is done and `receive` has put them in their place.

    Parameters of a class of their own, which nothing can make wait, have them at once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], work: Any, receive: Callable[[], None]) -> None:
        self.under_way: tuple[Any, Callable[[], None]] | None = (work, receive)
        self.pending: list[PendingParameter] = []
        if any(type(parameter) is not nn.Parameter for parameter in parameters):
            self.complete()
            return
        for parameter in parameters:
            parameter.__class__ = PendingParameter
            assert isinstance(parameter, PendingParameter)
            parameter._arrival = self
            self.pending.append(parameter)

    def complete(self) -> None:
        """Wait for the values, unless that has been done."""
        if self.under_way is None:
            return
        work, receive = self.under_way
        self.under_way = None  # and with it the buffer that `receive` reads
        for parameter in self.pending:
            del parameter._arrival
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        work.wait()
        with torch.inference_mode(False), torch.no_grad():
            receive()
        self.pending = []


class PendingParameter(nn.Parameter):
    """A parameter until its values have arrived, after which it is a plain one again; the object stays the same.

    What asks for its gradient, its size and the like, as `zero_grad` does, waits for nothing.
    """

    _arrival: Arrival

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in READS_NO_VALUES:
            for value in tree_leaves((args, kwargs)):
                if type(value) is PendingParameter:
                    value._arrival.complete()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _arrived(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _arrived(self).__reduce_ex__(protocol)


def _arrived(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is PendingParameter:
        parameter._arrival.complete()
    return parameter


READS_NO_VALUES = {
    *(
        accessor
        for name in ("grad", "requires_grad", "grad_dtype")
        for accessor in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__)
    ),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_leaf", "is_meta")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "is_contiguous")),
    Tensor.requires_grad_,
    Tensor.register_post_accumulate_grad_hook,
}
