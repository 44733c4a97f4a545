"""The producer of StepRecords on fakes: a dispatch mode that sees every operator above the device, and its memory.

Operators that the device has no kernel of are taken apart as the dispatcher would, so that what is recorded is what the
recorder of a core sees. Nothing is computed: a scalar that is read is a placeholder, and ends a graph.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from optimum_trn.device.record import Allocation, Collective, Cut, CutReason, Operation, Scalar, StepRecord, TensorType

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
"""Operators of c10d and the collectives that they are."""

OUTPUTS_FIRST = {"_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_"} | {
    "alltoall_base_"
}
"""Operators of c10d whose first argument is what arrives, and whose second is what this rank gives."""

WITHOUT_CODE = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::resize_",
    "aten::is_pinned",
    "aten::_has_compatible_shallow_copy_type",
    "aten::_unsafe_view",
    "aten::is_same_size",
}
"""Operators, whatever the overload, that only allocate or look at memory in another way, but are no views in torch."""

# torch's counter knows the accelerators' fused attention kernels, not the CPU's, which is the one the device runs.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, out_shape, **kwargs: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, out_shape, **kwargs: sdpa_backward_flop_count(grad, query, key, value)
    ),
}

# Not FlopCounterMode: it looks at what modules return, which computes logits that a loss takes in parts.
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(formula) for operator, formula in _CPU_ATTENTION.items()},
}

READS = ("aten::_local_scalar_dense", "aten::item", "aten::equal")
"""Operators whose result is a number on the host."""

PLACEHOLDER = 1
"""What a scalar is that is read off a tensor without data; 1 divides, multiplies and is finite."""

BLOCK = 512
"""Bytes that allocations on a core are multiples of (device/csrc/arena.h)."""


class Recording(TorchDispatchMode):
    """Inside, records the step of tensors on `device`: operators, collectives, allocations and cuts, in `record`.

    On fakes, enter it inside their mode. `memory` and `kinds` say what lives at each moment: see planning/hbm.py.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.record = StepRecord()
        self.enabled = True
        self.memory: list[tuple[int, int, int]] = []  # (place in the events, storage, bytes more or fewer)
        self.before: dict[int, int] = {}  # bytes by storage, of what lived when the step began
        self.kinds: dict[int, str] = {}
        self._live: dict[int, int] = {}
        self.flops = 0  # of matrix products and attention, a multiply-add counting two
        self._storages: dict[int, Any] = {}
        self._names: dict[int, int] = {}
        self._count = 0

    # ---- Operators --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        if func.namespace == "prim":  # a fake is asked for its device
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        name = func._schema.name
        if name in READS:
            if self._on_device(args):
                self._cut("scalar")
            if isinstance(args[0], FakeTensor):
                return True if name == "aten::equal" else _placeholder(args[0].dtype)
            return func(*args, **kwargs)
        if self._crosses(func, args, kwargs):
            result = func(*args, **kwargs)
            self._track(tree_leaves(result))
            return result
        if func.is_view or name in WITHOUT_CODE:
            result = func(*args, **kwargs)
            self._track(tree_leaves(result))
            return result
        apart = _parts_kernel(func)
        if apart is not None:
            with self:
                return apart(*args, **kwargs)
        result = func(*args, **kwargs)
        if name == "aten::native_layer_norm" and isinstance(args[0], FakeTensor):
            result = _statistics_of_the_core(result, args)
        if self._on_device(tree_leaves((args, kwargs, result))):
            self.record.events.append(_operation(func, args, kwargs))
            formula = FLOPS.get(func._overloadpacket)
            self.flops += formula(*args, **kwargs, out_val=result) if formula else 0
            self._track(tree_leaves(result))
        return result

    def begin_step(self) -> None:
        """Forget all events: a step begins, with what lives now."""
        self.record, self.memory, self.before = StepRecord(), [], dict(self._live)
        self.flops = 0

    def end_step(self) -> None:
        """The step is over: so is its last graph."""
        self.record.events.append(Cut("step"))

    def _crosses(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator copies between the core and the host, which is noted."""
        if func._schema.name == "aten::copy_":
            target, source = args[0], args[1]
            source_device, target_device = _device(source), _device(target)
        elif func._schema.name == "aten::_to_copy":
            source_device = _device(args[0])
            target_device = torch.device(kwargs.get("device") or source_device)
        else:
            return False
        if source_device.type == target_device.type:
            return False
        if self.device.type in (source_device.type, target_device.type):
            self._cut("copy to host" if source_device.type == self.device.type else "copy from host")
        return True

    def _cut(self, reason: CutReason) -> None:
        self.record.events.append(Cut(reason, where()))

    def _on_device(self, values: Iterable[Any]) -> bool:
        return any(isinstance(value, Tensor) and _device(value).type == self.device.type for value in values)

    # ---- Collectives ------------------------------------------------------------------------------------------------

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        short = func._schema.name.split("::")[1]
        leaves = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if short in COLLECTIVES and self._on_device(leaves):
            given = args[1] if short in OUTPUTS_FIRST else args[0]
            group = next(iter(_groups_in(args)))
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = None
            if short in ("send", "recv_"):
                peer = ranks[args[2]]
            self.record.events.append(
                Collective(
                    COLLECTIVES[short],
                    tuple(map(_type, (value for value in tree_leaves(given) if isinstance(value, Tensor)))),
                    ranks,
                    _reduction(args),
                    peer,
                )
            )
            for tensor in leaves:
                self.kinds.setdefault(self._storage(tensor), "collective buffers")
        return func(*args, **kwargs)

    # ---- Memory -----------------------------------------------------------------------------------------------------

    def mark(self, kind: str, values: Iterable[Any]) -> None:
        """Say what the tensors among `values` are for; what is never marked is an activation."""
        for value in values:
            if isinstance(value, Tensor) and _device(value).type == self.device.type:
                self.kinds[self._storage(value)] = kind

    def _track(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and _device(value).type == self.device.type:
                self._storage(value)

    def _storage(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is new if it was never seen."""
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None and known() is storage:
            return self._names[key]
        number = self._count = self._count + 1
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._storages[key] = weakref.ref(storage, lambda _: self._freed(number, size))
        self._names[key] = number
        if size:
            self._live[number] = size
            self.memory.append((len(self.record.events), number, size))
            self.record.events.append(Allocation(size))
        return number

    def _freed(self, number: int, size: int) -> None:
        if size and self.enabled:
            del self._live[number]
            self.memory.append((len(self.record.events), number, -size))
            self.record.events.append(Allocation(-size))


def where() -> str:
    """The innermost line that is neither this package's nor a library's: what the user wrote, or ""."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if "-packages" not in path and not path.startswith((_OWN, _LIBRARY)) and path[0] != "<":
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


_OWN = str(Path(__file__).resolve().parent.parent)
_LIBRARY = os.path.dirname(os.__file__)


def _device(tensor: Tensor) -> torch.device:
    """Of a fake, too, which goes through all modes when it is asked."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _statistics_of_the_core(result: Any, args: Sequence[Any]) -> Any:
    """Means and deviations in the dtype of the input, as the core's kernel makes them where the weight has it, too.

    torch's fake kernel makes them in float32 on every device but the CPU.
    """
    output, mean, deviation = result
    weight = args[2]
    if weight is None or weight.dtype != args[0].dtype or mean.dtype == args[0].dtype:
        return result
    return output, *(torch.empty_like(each, dtype=args[0].dtype) for each in (mean, deviation))


def _placeholder(dtype: torch.dtype) -> Scalar:
    if dtype == torch.bool:
        return True
    return float(PLACEHOLDER) if dtype.is_floating_point else PLACEHOLDER


_APART: dict[Any, Any] = {}


def _parts_kernel(func: Any) -> Any:
    """The composite kernel that the dispatcher would take for an operator without one of the device; else None."""
    if func not in _APART:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        name = func.name()
        own = has(name, "PrivateUse1") or has(name, "CPU") or name.startswith("aten::copy_")
        found = None
        for key in ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd"):
            if not own and found is None and has(name, key):
                found = _kernel(func, getattr(torch._C.DispatchKey, key))
        _APART[func] = found
    return _APART[func]


def _kernel(func: Any, key: Any) -> Any:
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


def _operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operation:
    inputs: list[TensorType] = []
    scalars: list[Scalar] = []
    for value in tree_leaves((list(args), dict(kwargs))):
        if isinstance(value, Tensor):
            inputs.append(_type(value))
        elif isinstance(value, torch.dtype):
            scalars.append(str(value).removeprefix("torch."))
        elif value is None or isinstance(value, bool | int | float | str):
            scalars.append(value)
    name = "aten::_copy_from" if func._schema.name == "aten::copy_" else func.name()
    return Operation(name, tuple(inputs), tuple(scalars))


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _groups_in(args: Sequence[Any]) -> Iterable[Any]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            yield dist.ProcessGroup.unbox(argument)


def _reduction(args: Sequence[Any]) -> str | None:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ReduceOp" in str(argument._type()):
            return "reduced"
    return None
