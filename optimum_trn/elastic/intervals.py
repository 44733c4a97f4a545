"""How often to save: the best interval between checkpoints, and the time that a failure costs at any interval."""

from __future__ import annotations

import math


def young_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between checkpoints that cost the least, to first order (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * checkpoint_seconds * failure_seconds)


def daly_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """The same to higher order, for checkpoints that are not short against the time between failures.

    Equation 37 of Daly, FGCS 22(3), 2006. `failure_seconds` is the mean time between failures.
    """
    if checkpoint_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = math.sqrt(checkpoint_seconds / (2 * failure_seconds))
    return young_interval(checkpoint_seconds, failure_seconds) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint_seconds


def wasted_seconds(checkpoint_seconds: float, interval_seconds: float, retrieval_seconds: float) -> float:
    """What a failure costs on average: the checkpoint that was not complete, half an interval, and reading it back.

    Equation 1 of Gemini (Wang et al., SOSP 2023). An interval can't be shorter than a checkpoint takes.
    """
    return checkpoint_seconds + max(interval_seconds, checkpoint_seconds) / 2 + retrieval_seconds
