"""When the links between hosts are idle within a training step, learnt from steps, so that copies travel then.

As in Gemini (Wang et al., SOSP 2023, section 5): idle spans are profiled, and chunks sent where they fit.
"""

from __future__ import annotations

import bisect
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROFILED_STEPS = 5
"""Of which the median counts; training steps vary by less than a tenth (Gemini, section 5.2)."""
SAFETY = 1.25
"""A span is taken to be so much shorter than it was."""
PATIENCE_SECONDS = 1.0
"""A chunk that no span of so many seconds has room for is sent at the beginning of one."""


class IdleSpans:
    """Says when a chunk may be sent: the trainer marks when it uses the links, a thread that copies waits in `pace`.

    A chunk is acknowledged before the next one is sent, so that they do not queue up before what training sends next.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._busy = 0
        self._step_began = now()
        self._starts: list[float] = []  # of what used the links in this step, from its beginning
        self._profile: deque[list[float]] = deque(maxlen=PROFILED_STEPS)
        self._lengths: deque[float] = deque(maxlen=PROFILED_STEPS)
        self.bytes_per_second: float | None = None
        self._closed = False

    def begin_step(self) -> None:
        """A training step begins, and the one before it has ended."""
        with self._changed:
            now = self._now()
            self._profile.append(self._starts)
            self._lengths.append(now - self._step_began)
            self._step_began, self._starts = now, []
            self._changed.notify_all()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around what uses the links."""
        with self._changed:
            self._busy += 1
            if self._busy == 1:
                self._starts.append(self._now() - self._step_began)
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def expected_idle(self) -> float:
        """Seconds that the links will stay idle from now on, as in the steps before; 0 while they are in use."""
        with self._changed:
            return self._expected_idle()

    def _expected_idle(self) -> float:
        if self._busy:
            return 0.0
        counts = [len(starts) for starts in self._profile]
        if not counts or not max(counts):
            return float("inf")
        usual = statistics.mode(counts)
        alike = [starts for starts in self._profile if len(starts) == usual]
        starts = [statistics.median(column) for column in zip(*alike, strict=True)]
        if not starts:
            return float("inf")
        position = self._now() - self._step_began
        place = bisect.bisect_right(starts, position)
        # The last span reaches into the next step; a step that is late is idle until it says otherwise.
        next_start = starts[place] if place < len(starts) else statistics.median(self._lengths) + starts[0]
        return max(0.0, next_start - position)

    @contextmanager
    def pace(self, size: int) -> Iterator[None]:
        """Around sending `size` bytes, which begins when they fit; how long it takes tells the speed of the link."""
        self._wait_for(size)
        began = self._now()
        yield
        rate = size / max(self._now() - began, 1e-9)
        with self._changed:
            self.bytes_per_second = rate if self.bytes_per_second is None else (self.bytes_per_second + rate) / 2

    def _wait_for(self, size: int) -> None:
        with self._changed:
            seconds = 0.0 if self.bytes_per_second is None else SAFETY * size / self.bytes_per_second
            deadline = self._now() + PATIENCE_SECONDS + seconds
            while not self._closed:
                idle = self._expected_idle()
                if not self._busy and (idle >= seconds or self._now() >= deadline):
                    return
                self._changed.wait(timeout=min(0.05, max(0.001, idle)))

    def close(self) -> None:
        """Hold nothing back any more: training has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
