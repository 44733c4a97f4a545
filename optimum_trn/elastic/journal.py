"""The journal of a job: one line of JSON for everything that happened, each on the disk before what follows from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to a file; every line has the time, in seconds of the monotonic clock and of the calendar."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """Add an event."""
        line = {"event": event, "monotonic": time.monotonic(), "time": time.time(), **fields}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """No more events."""
        self._file.close()


def read_journal(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The events of a journal, of one kind or all; a line that is being written is not one yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [found for found in events if event in (None, found["event"])]
