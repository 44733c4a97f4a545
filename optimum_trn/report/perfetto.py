"""Traces that Perfetto and Chrome open: slices of engines, one process a core and one thread an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """`engine` of `core` does `name` from `start` for `seconds`."""

    core: str
    engine: str
    name: str
    start: float
    seconds: float


def chrome_trace(slices: Iterable[Slice], status: str) -> str:
    """The JSON of the Trace Event Format: complete events in microseconds, with the names of cores and engines.

    Format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    events: list[dict[str, object]] = []
    cores: dict[str, int] = {}
    engines: dict[tuple[str, str], int] = {}
    for item in slices:
        if item.core not in cores:
            cores[item.core] = len(cores)
            events.append(_name("process_name", cores[item.core], 0, item.core))
        key = (item.core, item.engine)
        if key not in engines:
            engines[key] = sum(core == item.core for core, _ in engines)
            events.append(_name("thread_name", cores[item.core], engines[key], item.engine))
        events.append(
            {
                "ph": "X",
                "name": item.name,
                "pid": cores[item.core],
                "tid": engines[key],
                "ts": item.start * 1e6,
                "dur": item.seconds * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"status": status}})


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
