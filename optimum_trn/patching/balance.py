"""Where to cut a stack of layers into pipeline stages, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from optimum_trn.errors import PlanError


def cost(module: nn.Module, config: Any = None) -> float:
    """Multiplications for one token in one forward pass, up to what depends on the length of the sequence.

    Each entry of a weight multiplies once; of a look-up table one row is read; of the experts of a mixture, those that
    `config` says a token goes to.
    """
    total = 0.0
    for inner in module.modules():
        for parameter in inner.parameters(recurse=False):
            if isinstance(inner, nn.Embedding):
                total += parameter.shape[-1]
            elif parameter.dim() == 3:
                experts = parameter.shape[0]
                total += parameter.numel() * min(1.0, (_experts_of_a_token(config) or experts) / experts)
            else:
                total += parameter.numel()
    return total


def _experts_of_a_token(config: Any) -> int | None:
    return getattr(config, "num_experts_per_tok", None)


def balanced_ends(costs: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0) -> list[int]:
    """The last layer of each stage but the last, such that the most expensive of `num_stages` costs least.

    `before` and `after` are what the first and the last stage have besides layers.  Of equally good cuts, the one whose
    earlier stages are the shortest: they keep the activations of the most micro-batches.  `PlanError` for more stages
    than layers.
    """
    count = len(costs)
    if num_stages > count:
        raise PlanError(f"{count} layers cannot be cut into {num_stages} pipeline stages; {count} is the most.")
    sums = [0.0, *accumulate(costs)]

    def stage_cost(start: int, end: int) -> float:
        return sums[end] - sums[start] + (before if start == 0 else 0.0) + (after if end == count else 0.0)

    # best[start]: the least possible cost of layers from `start` on, in the number of stages of this round.
    best = [stage_cost(start, count) for start in range(count)] + [math.inf]
    choices: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        worse = [math.inf] * (count + 1)
        choice = [count] * (count + 1)
        for start in range(count - stages + 1):
            for end in range(start + 1, count - stages + 2):
                candidate = max(stage_cost(start, end), best[end])
                if candidate < worse[start]:
                    worse[start], choice[start] = candidate, end
        best = worse
        choices.append(choice)
    ends, start = [], 0
    for choice in reversed(choices):
        start = choice[start]
        ends.append(start - 1)
    return ends
