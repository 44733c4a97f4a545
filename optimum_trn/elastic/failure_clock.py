"""When nodes fail, and come back: at a fixed period, at random, or as a trace of a real cluster says."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class Event(NamedTuple):
    """At `seconds` from the start, that many nodes fail at once (`change` < 0) or come (`change` > 0)."""

    seconds: float
    change: int


class FailureClock(Protocol):
    """What says when nodes fail."""

    period: float
    """Mean seconds between failures of the whole cluster when all nodes are there."""

    def events(self) -> Iterator[Event]:
        """In their order, the same at every call."""


class FixedClock:
    """A node fails every `period` seconds."""

    def __init__(self, period: float) -> None:
        if period <= 0:
            raise ValueError(f"A period of {period:g} s between failures is none: give more than 0.")
        self.period = period

    def events(self) -> Iterator[Event]:
        """One node at every multiple of the period, without an end."""
        count = 0
        while True:
            count += 1
            yield Event(count * self.period, -1)


class PoissonClock:
    """Failures that know nothing of each other: exponential times of mean `period` between them, from a seed."""

    def __init__(self, period: float, seed: int = 0) -> None:
        self.period = FixedClock(period).period
        self.seed = seed

    def events(self) -> Iterator[Event]:
        """One node at each, without an end."""
        draw, now = random.Random(self.seed), 0.0
        while True:
            now += draw.expovariate(1 / self.period)
            yield Event(now, -1)


class TraceClock:
    """Failures and arrivals of a file of lines `seconds,event[,nodes]`, whose events are `remove` and `add`.

    `nodes` is a number (1 unless given) or, as in traces of spot instances, the name of one node. Events of one time
    happen at once. Raises ValueError for a file that is no such trace.
    """

    def __init__(self, path: str | Path) -> None:
        changes: dict[float, int] = {}
        with open(path, newline="", encoding="utf-8") as stream:
            for number, row in enumerate(csv.reader(stream), start=1):
                if not row or row[0].startswith("#") or (number == 1 and row[0] == "seconds"):
                    continue
                try:
                    seconds, sign = float(row[0]), {"add": 1, "remove": -1}[row[1].strip()]
                    count = int(row[2]) if len(row) > 2 and row[2].strip().isdecimal() else 1
                except (IndexError, KeyError, ValueError):
                    raise ValueError(
                        f"{path}:{number}: {','.join(row)!r} is no line of a trace, such as 600,remove,2 or 900,add."
                    ) from None
                changes[seconds] = changes.get(seconds, 0) + sign * count
        self._events = [Event(seconds, change) for seconds, change in sorted(changes.items()) if change]
        removals = _removals(self._events)
        if not removals:
            raise ValueError(f"{path} holds no failure.")
        self.period = self._events[-1].seconds / removals

    def events(self) -> Iterator[Event]:
        """Those of the file."""
        return iter(self._events)


def _removals(events: Sequence[Event]) -> int:
    return sum(event.change < 0 for event in events)
