"""What one forward pass of a tiny model tells of its structure: calls in order, arguments, and numbers of heads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from optimum_trn.patching.proof import Subject, copied


class Features(NamedTuple):
    """The widths of a linear layer."""

    input: int
    output: int


@dataclass
class Trace:
    """Modules by path: those that were called, linears in order of their calls, arguments, numbers of heads."""

    called: set[str] = field(default_factory=set)
    linears: list[str] = field(default_factory=list)
    arguments: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)


def features(module: nn.Module) -> Features | None:
    """The widths of a module that multiplies by one weight matrix; None for any other."""
    weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
    if weight is None or isinstance(module, nn.Embedding):
        return None
    if isinstance(module, Conv1D):
        return Features(weight.shape[0], weight.shape[1])
    if isinstance(module, nn.modules.conv._ConvNd):
        pointwise = weight[0, 0].numel() == 1 and module.groups == 1
        return Features(weight.shape[1], weight.shape[0]) if pointwise else None
    if weight.dim() == 2 and (isinstance(module, nn.Linear) or "Linear" in type(module).__name__):
        return Features(weight.shape[1], weight.shape[0])
    return None


def traced(subject: Subject) -> Trace:
    """Runs the model of `subject` once."""
    model = copy.deepcopy(subject.model)  # which may keep what it computes
    names = {module: name for name, module in model.named_modules()}
    trace, stack = Trace(), []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[module]
        stack.append(name)
        trace.called.add(name)
        if features(module) is not None:
            trace.linears.append(name)
        trace.arguments.setdefault(name, _arguments(module, args, kwargs))
        if args and isinstance(args[0], Tensor) and args[0].dim():
            trace.widths.setdefault(name, args[0].shape[-1])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if stack:
            stack.pop()

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]

    class Heads(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            scores = function in (F.softmax, torch.softmax, Tensor.softmax, F.scaled_dot_product_attention)
            if scores and stack and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
                trace.heads.setdefault(stack[-1], args[0].shape[1])
            return function(*args, **(kwargs or {}))

    try:
        with subject.precision(), Heads(), torch.no_grad():
            model(**copied(subject.inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the floating tensors that a module is called with, by the names of its forward's arguments."""
    names = list(inspect.signature(module.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {
        name: tuple(value.shape)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
