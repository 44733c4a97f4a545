"""The record of a step as a simulated core really did it, in the schema of record.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from optimum_trn.device.build import load_extension
from optimum_trn.device.record import (
    Allocation,
    Collective,
    Cut,
    CutReason,
    Event,
    Operation,
    Scalar,
    StepRecord,
    TensorType,
)
from optimum_trn.device.step_graphs import KINDS, StepGraphs

REASONS: dict[str, CutReason] = {KINDS["value"]: "scalar", KINDS["copy"]: "copy to host", KINDS["print"]: "print"}
SHORTER = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
IGNORED = {"layout", "device", "pin_memory", "memory_format", "generator", "non_blocking"}
# Numbers of torch's ScalarType (c10/core/ScalarType.h), which arguments named `dtype` arrive as.
DTYPES = {
    **dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))),
    **{8: "complex32", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16"},
}


def last_step(graphs: StepGraphs) -> StepRecord:
    """What the last step did. Allocations are those of the first time that its graphs ran."""
    record = StepRecord(simulated=False)
    for number, read in graphs.last_step:
        record.events += graph_events(number)
        record.events.append(Cut("step") if read is None else Cut(REASONS[read.kind], str(read.line)))
    return record


def graph_events(number: int) -> list[Event]:
    """One graph by its number in the recorder: operations, collectives, and what was allocated and freed between."""
    events: list[Event] = []
    live: int | None = None
    for name, _, arguments, results, before, after in load_extension().graph_operations(number):
        if live is not None and before != live:
            events.append(Allocation(before - live))
        events.append(_event(name, arguments))
        live = before
        if results and after != before:
            events.append(Allocation(after - before))
            live = after
    return events


def _event(name: str, arguments: list[Any]) -> Operation | Collective:
    if name.startswith("neuron:") and not name.startswith("neuron::"):
        ranks, inputs, outputs = arguments
        given = tuple(_tensors(inputs or outputs))
        short = name.removeprefix("neuron:").removesuffix("_coalesced")
        return Collective(SHORTER.get(short, short), given, tuple(ranks))
    scalars: list[Scalar] = []
    for argument, value in _given(name, arguments):
        if argument == "dtype" and isinstance(value, int):
            scalars.append(DTYPES[value])
        elif argument not in IGNORED:
            scalars += _scalars(value)
    return Operation(name, tuple(_tensors(arguments)), tuple(scalars))


def _given(name: str, arguments: list[Any]) -> list[tuple[str, Any]]:
    """Arguments by name, without those that are left at their defaults, as torch hands them to dispatch modes."""
    schema = _schema(name)
    if schema is None or len(schema) != len(arguments):
        return [("", value) for value in arguments]
    positional = sum(not argument.kwarg_only for argument in schema)
    while positional and _is_default(schema[positional - 1], arguments[positional - 1]):
        positional -= 1
    return [
        (argument.name, value)
        for place, (argument, value) in enumerate(zip(schema, arguments, strict=True))
        if place < positional or (argument.kwarg_only and not _is_default(argument, value))
    ]


def _is_default(argument: Any, value: Any) -> bool:
    return bool(argument.has_default_value() and argument.default_value == value)


def _tensors(values: list[Any]) -> Iterator[TensorType]:
    for value in values:
        if isinstance(value, list):
            yield from _tensors(value)
        elif isinstance(value, tuple):
            dtype, shape = value
            yield TensorType(tuple(shape), str(dtype).removeprefix("torch."))


def _scalars(value: Any) -> Iterator[Scalar]:
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield value


@functools.cache
def _schema(operation: str) -> tuple[Any, ...] | None:
    namespace, _, rest = operation.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    schema = getattr(getattr(packet, overload or "default", None), "_schema", None)
    return None if schema is None else tuple(schema.arguments)
