"""Says in words why a graph is new: what came where something else was expected, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from optimum_trn.device.code_lines import names_of_tensors, users_line

Operation = tuple[str, bool, list[Any]]
"""Name, whether it belongs to the optimizer's step, and arguments: a tensor is (dtype, shape)."""

_GENERATION = ("transformers/generation/",)
_EVALUATION = {"evaluation_loop", "evaluate", "prediction_step", "predict", "prediction_loop"}


def explain(
    expected: Operation | None,
    actual: Operation,
    *,
    step: int,
    stack: list[FrameType],
    after_end: bool,
    starts_over: bool,
    should_start_over: bool,
    input_of: Callable[[int], tuple[int, ...] | None],
) -> str:
    """Why `actual` makes a new graph where `expected` came before (None: a known graph ended there or nothing did).

    `input_of` is the shape of the latest tensor with a number of elements that came from the host.
    """
    line = users_line(stack)
    where = f"at step {step} ({line})"
    if expected is None:
        return f"the code went on with {_said(actual)} {where}, where a graph had ended before"
    if expected[0] == actual[0] and expected[1] == actual[1]:
        changed = _changed(expected, actual)
        if changed is not None:
            name, before, now = changed
            if _is_tensor(before) and _is_tensor(now):
                return _explain_tensors(actual, name, before, now, where, stack, input_of)
            return (
                f"{name} of {actual[0]} was {before} and became {now} {where}: numbers are compiled into the graph; "
                "keep it constant, or pass it as a tensor"
            )
    fewer = should_start_over and not starts_over
    if expected[1] != actual[1] and (starts_over or fewer):
        return (
            f"{'fewer' if fewer else 'more'} micro-batches came before the optimizer's step {where}: gradient "
            "accumulation changed; keep gradient_accumulation_steps constant, the last step of an epoch included"
        )
    if expected[1] and actual[1]:
        return (
            f"the optimizer did {_said(actual)} instead of {_said(expected)} {where}: its first step makes its states"
        )
    if after_end:
        return f"the code went on with {_said(actual)} {where}, where a graph had ended before"
    return f"the code took another path {where}: {_said(actual)} instead of {_said(expected)}"


def _explain_tensors(
    operation: Operation,
    argument: str,
    before: Any,
    now: Any,
    where: str,
    stack: list[FrameType],
    input_of: Callable[[int], tuple[int, ...] | None],
) -> str:
    (old_type, old), (new_type, new) = before, now
    names = names_of_tensors(new, stack)
    # An embedding, say, sees its indices flattened.
    old_input, new_input = input_of(math.prod(old)), input_of(math.prod(new))
    if not names and old_input and new_input and len(old_input) == len(new_input) and old != new:
        names = names_of_tensors(new_input, stack)
        if names:
            old, new = old_input, new_input
    name = names[0] if names else f"{argument} of {operation[0]}"
    if old == new:
        return f"{name} {list(new)} was {_short(old_type)} and became {_short(new_type)} {where}: keep one dtype"
    return f"{name} {_shape(old)} became {_shape(new)} {where}: {_advice(old, new, stack)}"


def _advice(old: tuple[int, ...], new: tuple[int, ...], stack: list[FrameType]) -> str:
    files = {frame.f_code.co_filename for frame in stack}
    functions = {frame.f_code.co_name for frame in stack}
    if any(part in file for part in _GENERATION for file in files):
        return "generation with a growing cache; use a static one (cache_implementation='static')"
    evaluates = bool(functions & _EVALUATION) or not torch.is_grad_enabled()
    during = "evaluation at " if evaluates else ""
    if len(old) == len(new) and old[1:] == new[1:] and new[0] < old[0]:
        remedy = "pad to full batches (static_shapes='auto')" if evaluates else "set dataloader_drop_last or pad"
        return f"{'evaluation, ' if evaluates else ''}last partial batch; {remedy}"
    if len(old) == len(new) and old[:1] == new[:1]:
        return (
            f"{during}another sequence length; pad to one length (padding='max_length') or to a few "
            "(static_shapes='auto')"
        )
    return f"{during}another batch shape; use one batch size, and pad (static_shapes='auto')"


def _changed(expected: Operation, actual: Operation) -> tuple[str, Any, Any] | None:
    """The first argument that differs: its name, and what it was and is."""
    for place, (before, now) in enumerate(zip(expected[2], actual[2], strict=False)):
        if before == now and type(before) is type(now):
            continue
        if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            for one, other in zip(before, now, strict=True):
                if one != other:
                    return _argument(actual[0], place), one, other
        return _argument(actual[0], place), before, now
    return None


def _argument(operation: str, place: int) -> str:
    """The name of an argument in the operator's schema."""
    namespace, _, rest = operation.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    if packet is None or not hasattr(packet, overload or "default"):
        return f"argument {place + 1}"
    return str(getattr(packet, overload or "default")._schema.arguments[place].name)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _said(operation: Operation) -> str:
    tensors = [value for value in operation[2] if _is_tensor(value)]
    return f"{operation[0]} of {_shape(tensors[0][1])}" if tensors else operation[0]
