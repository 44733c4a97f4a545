"""Autotuning: the best of an ordered space of named choices, in few evaluations, when memory bounds the space.

A schedule's knobs (micro-batch size, recomputed fraction, ...) as Slapo tunes them (Chen et al., ASPLOS 2024,
doi:10.1145/3617232.3640840), but along the whole frontier of what fits: Slapo's binary search, which stops when some
evaluations in a row bring nothing, ends 3 % below the optimum of its own published measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from optimum_trn.errors import PlanError

Chosen = dict[str, Any]
Values = Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]


class Space:
    """Named choices, in order; the values of a later one may depend on what the earlier ones are.

        space = Space().choice("batch_size", [8, 16, 32])
        space.choice("micro_batch_size", lambda chosen: [b for b in (1, 2, 4, 8) if chosen["batch_size"] % b == 0])

    The values of each of the last two choices stand in the order in which they need more memory.
    """

    def __init__(self) -> None:
        self._choices: dict[str, Values] = {}

    @property
    def names(self) -> list[str]:
        """The names of the choices, in order."""
        return list(self._choices)

    def choice(self, name: str, values: Values) -> Space:
        """Adds a choice among `values`, or among what a function of the earlier choices returns.

        Raises `PlanError` for a name that the space has already.
        """
        if name in self._choices:
            raise PlanError(f"The space has a choice {name!r} already.")
        self._choices[name] = values
        return self

    def values(self, name: str, chosen: Mapping[str, Any]) -> list[Any]:
        """The values of a choice, after `chosen`; `PlanError` if it depends on one that is not made yet."""
        values = self._choices[name]
        if not callable(values):
            return list(values)
        try:
            return list(values(chosen))
        except KeyError as error:
            raise PlanError(f"{name} depends on {error}, but is chosen after {list(chosen)} only.") from None

    def combinations(self, names: Sequence[str]) -> Iterator[Chosen]:
        """Every way to make the first choices, which are `names`."""
        if not names:
            yield {}
            return
        for chosen in self.combinations(names[:-1]):
            for value in self.values(names[-1], chosen):
                yield {**chosen, names[-1]: value}


@dataclass(frozen=True)
class Evaluation:
    """What was tried, and how good it is: the higher the better; None if it did not fit into memory."""

    chosen: Chosen
    score: float | None


@dataclass
class Tuning:
    """The journal of a search, in the order of the evaluations."""

    journal: list[Evaluation] = field(default_factory=list)
    complete: bool = True

    @property
    def best(self) -> Evaluation:
        """The evaluation with the highest score, the earliest of equals; `PlanError` if nothing fitted."""
        feasible = [evaluation for evaluation in self.journal if evaluation.score is not None]
        if not feasible:
            raise PlanError(
                f"None of the {len(self.journal)} choices that were tried fits into memory, down to "
                f"{self.journal[-1].chosen if self.journal else {}}. Extend the space towards less memory."
            )
        return max(feasible, key=lambda evaluation: evaluation.score or 0.0)

    def __str__(self) -> str:
        lines = [
            f"{', '.join(f'{name} {value}' for name, value in chosen.items())}: "
            + ("out of memory" if score is None else f"{score:.6g}")
            for chosen, score in ((evaluation.chosen, evaluation.score) for evaluation in self.journal)
        ]
        end = "" if self.complete else ", the budget, was not enough to see the whole frontier"
        return "\n".join([*lines, f"{len(self.journal)} evaluations{end}"])


def autotune(evaluate: Callable[..., float | None], space: Space, budget: int | None = None) -> Tuning:
    """Looks for the choices with the highest `evaluate(**choices)`, in at most `budget` evaluations.

    `evaluate` returns None, or raises `torch.OutOfMemoryError`, for what does not fit.  Two properties of the last two
    choices save evaluations: what needs more memory than something that did not fit does not fit either, and, of what
    fits, more memory along the last choice buys more speed (recomputing less, for instance).  The best is therefore on
    the frontier of what fits, which a staircase follows: m + n values take about m + n + m evaluations out of m * n.
    """
    tuning = Tuning()
    *outer, row_name, column_name = ["", "", *space.names][-max(2, len(space.names)) :]
    for chosen in space.combinations(outer):
        rows = reversed(space.values(row_name, chosen)) if row_name else (None,)
        frontier: Any = None
        for row in rows:
            start = {**chosen, row_name: row} if row_name else chosen
            columns = space.values(column_name, start)
            # The last value that fitted with more memory elsewhere fits here.
            first = columns.index(frontier) if frontier in columns else 0
            for index in count(first):
                if index == len(columns):
                    break
                if len(tuning.journal) == budget:
                    tuning.complete = False
                    return tuning
                point = {**start, column_name: columns[index]}
                score = _score(evaluate, point)
                tuning.journal.append(Evaluation(point, score))
                if score is None:
                    break
                frontier = columns[index]
    return tuning


def _score(evaluate: Callable[..., float | None], point: Chosen) -> float | None:
    try:
        return evaluate(**point)
    except torch.OutOfMemoryError:
        return None
