"""Initialises a model as its stock class would, but with one whole weight at a time in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import TORCH_INIT_FUNCTIONS

from ..errors import UnsupportedModelError

# What transformers' initialisers call, by name; it exchanges them itself where it wants none.
INITIALISERS: dict[str, Callable[..., Any]] = TORCH_INIT_FUNCTIONS  # type: ignore[assignment]


@dataclass(frozen=True)
class Write:
    """One in-place operator or initialiser that ran on a view of the given geometry of a weight's storage."""

    operator: Callable[..., Any]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator_state: Tensor | None  # of the CPU generator before the operator drew from it; None if it draws nothing

    def replay(self, flat: Tensor) -> None:
        """Run the operator on `flat`, the weight's storage as a 1-D CPU tensor."""
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        self.operator(flat.as_strided(self.size, self.stride, self.offset), *self.args, **self.kwargs)


@dataclass
class History:
    """The writes to one storage since the last one that overwrote it whole."""

    storage: torch.UntypedStorage  # held, so that its address is not given to another tensor
    writes: list[Write] = field(default_factory=list)
    complete: bool = False  # whether there was such a write at all


class DeferredInit(TorchDispatchMode):
    """While active, records what initialisers write to meta tensors; `draw` runs it again, for one tensor, on the CPU.

    A random operator also runs at once, on a scratch tensor of the same shape, so that the CPU generator passes through
    exactly the states it would pass through if the tensors were real: the values are bit-equal to the stock ones,
    whatever order they are drawn in later and whatever else is never drawn.  No more than one whole weight exists.
    Those initialisers of torch that transformers calls are recorded as one: some look at what they have drawn, and
    `trunc_normal_` does nothing to meta tensors.

    Raises `UnsupportedModelError` when an initialiser reads the values of a tensor that does not exist yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._histories: dict[int, History] = {}
        self._stock_initialisers: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> DeferredInit:
        self._stock_initialisers.update(INITIALISERS)
        for name, function in self._stock_initialisers.items():
            INITIALISERS[name] = partial(self._initialise, function)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        INITIALISERS.update(self._stock_initialisers)

    def _initialise(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta:
            self._record(function, tensor, args, kwargs, whole=True)
            return tensor
        result: Tensor = function(tensor, *args, **kwargs)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        writes_first = bool(func._schema.arguments) and _is_written(func._schema.arguments[0])
        target = args[0] if writes_first else None
        reads = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not target]
        if any(value.is_meta for value in reads) and not _is_view(func):
            raise UnsupportedModelError(
                f"An initialiser of this model computes one weight from another ({func}), which cannot be done without "
                f"holding both whole. Initialise the model in one process, save it, and load it with from_pretrained."
            )
        if isinstance(target, Tensor) and target.is_meta and torch.Tag.inplace_view not in func.tags:
            self._record(func, target, args[1:], kwargs, whole=func in OVERWRITES)
        return result

    def _record(self, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> None:
        """Records one call, which overwrites all of `target` if `whole`."""
        state = None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", (torch.Tag.nondeterministic_seeded,)):
            if kwargs.get("generator") is not None:
                raise UnsupportedModelError("An initialiser of this model draws from a generator of its own.")
            state = torch.get_rng_state()
            func(torch.empty_strided(target.size(), target.stride(), dtype=target.dtype), *args, **kwargs)
        history = self._histories.setdefault(id_of(target), History(target.untyped_storage()))
        if whole and target.numel() * target.element_size() == history.storage.nbytes():
            history.writes.clear()
            history.complete = True
        args = tuple(value.clone() if isinstance(value, Tensor) else value for value in args)
        history.writes.append(
            Write(func, target.size(), target.stride(), int(target.storage_offset()), args, kwargs, state)
        )

    def draw(self, tensor: Tensor) -> Tensor:
        """The value that the recorded initialisers give a meta tensor, on the CPU; a real tensor is its own value.

        Leaves the CPU generator as it finds it.  Raises `UnsupportedModelError` if no initialiser wrote the tensor.
        """
        if not tensor.is_meta:
            return tensor
        history = self._histories.get(id_of(tensor))
        if history is None or not history.complete:
            raise UnsupportedModelError(
                f"A weight of shape {tuple(tensor.shape)} must be initialised, but the model's class does not do it in "
                f"a way that can be cut. Initialise it in one process, save it, and load it with from_pretrained."
            )
        flat = torch.empty(history.storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for write in history.writes:
                write.replay(flat)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class EmptyOnMeta(TorchDispatchMode):
    """While active, `torch.empty` of two dimensions or more gives meta tensors: a constructor's weights take no memory.

    Unlike in a `torch.device("meta")` context, constructors run their initialisers.  Vectors stay real: they are small,
    and some classes compute with them (a tied bias is padded to the vocabulary).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        empty_on_cpu = func is torch.ops.aten.empty.memory_format and kwargs.get("device") in (
            None,
            torch.device("cpu"),
        )
        if empty_on_cpu and len(args[0]) >= 2:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": None}
        return func(*args, **kwargs)


# In-place operators whose result does not depend on what the tensor held.
OVERWRITES = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.copy_.default,
}


def id_of(tensor: Tensor) -> int:
    """What identifies a tensor's storage, for meta tensors too, as long as it lives."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its inputs' shape and storage, not at their values."""
    return func.is_view or torch.Tag.inplace_view in func.tags or func in METADATA_READERS


METADATA_READERS = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.new_ones.default,
}
