"""Says what fills a NeuronCore when a request does not fit, and what to do about it."""

import gc
from collections.abc import Iterable

import torch
from torch import nn

from optimum_trn.errors import NeuronOutOfMemoryError

ADVICE_CORE = (
    "Use a smaller per-device batch with more accumulation steps, gradient checkpointing, or a larger "
    "tensor_parallel_size; OPTIMUM_TRN_INSTANCE chooses an instance with more HBM per core."
)
ADVICE_HOST = (
    "The core itself has room: it is the host, whose memory stands in for HBM, that is full. Simulate fewer cores at a "
    "time, a smaller model, or use a larger machine; the planner traces any size without memory."
)


def raise_out_of_memory(device: int, requested: int, limit: int, tensors: int, scratch: int, host: bool) -> None:
    """Raise the error for a request that did not fit; the extension calls it where an operator returns to its caller.

    Args:
        device: index of the core.
        requested, tensors, scratch: bytes asked for, held by tensors, and held by temporaries of the running kernel.
        limit: bytes of the core's HBM, or the bytes that the host has left.
        host: whether it is the host that is full.

    Raises:
        NeuronOutOfMemoryError: always.
    """
    where = "The host of the simulated NeuronCores is" if host else f"NeuronCore ND 0:NC {device} is"
    free = limit if host else max(limit - tensors - scratch, 0)
    head = f"{where} out of memory. Failed to allocate {_size(requested)} (usage: tensors) on neuron:{device}; "
    head += f"{_size(free)} are free " + ("on the host." if host else f"of {_size(limit)}.")
    rows = [*usage_by_category(device, tensors).items(), ("kernel scratch", scratch)]
    total = tensors + scratch
    table = [f"  {name:<18}{_size(count):>12}" for name, count in rows] + [f"  {'total':<18}{_size(total):>12}"]
    table += [
        f"  {'requested':<18}{_size(requested):>12}",
        f"  {'limit':<18}{_size(total + limit if host else limit):>12}",
    ]
    raise NeuronOutOfMemoryError("\n".join([head, *table, ADVICE_HOST if host else ADVICE_CORE]))


def usage_by_category(device: int, tensors: int) -> dict[str, int]:
    """Bytes of a core's `tensors` bytes by what they serve; what no live object explains counts as activations."""
    # issubclass, not isinstance: the latter asks arbitrary objects for their __class__, which may run code.
    live = gc.get_objects()
    parameters = [
        x
        for x in live
        if issubclass(type(x), torch.Tensor) and (issubclass(type(x), nn.Parameter) or getattr(x, "_is_param", False))
    ]
    states = [
        value
        for optimizer in live
        if issubclass(type(optimizer), torch.optim.Optimizer)
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
    ]
    counted: set[int] = set()
    result = {
        "parameters": _storage_bytes(parameters, device, counted),
        "gradients": _storage_bytes((x.grad for x in parameters if x.grad is not None), device, counted),
        "optimizer states": _storage_bytes(states, device, counted),
    }
    result["other tensors"] = max(tensors - sum(result.values()), 0)
    return result


def _storage_bytes(tensors: Iterable[torch.Tensor], device: int, counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's memory is that of its local part
        if tensor.device.type != "neuron" or tensor.device.index != device:
            continue
        storage = tensor.untyped_storage()
        if storage.device.type == "neuron" and storage._cdata not in counted:  # a fake tensor's storage is on meta
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3f} {unit}"
    return f"{count} B"
