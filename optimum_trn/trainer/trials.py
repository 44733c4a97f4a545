"""Trials of a hyperparameter search on several ranks: what rank 0 gives up, all give up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class TrialEnded(Exception):
    """Rank 0 has given up the trial that this rank trains, too."""


@contextmanager
def pruned_together() -> Iterator[None]:
    """Around a report to the search, which only rank 0 has: where that prunes the trial, the others raise `TrialEnded`.

    A collective over the world. transformers leaves the other ranks training, waiting for rank 0 in the next step.
    """
    pruned: Exception | None = None
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "TrialPruned":  # of optuna, which need not be installed
            raise
        pruned = error
    answer = [pruned is not None]
    dist.broadcast_object_list(answer, src=0)
    if pruned is not None:
        raise pruned
    if answer[0]:
        raise TrialEnded
