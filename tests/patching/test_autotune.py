"""The tuner finds the optimum of published measurements on the frontier of what fits, and says what it tried."""

import json
from pathlib import Path

import pytest
import torch

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import Schedule, get_plan, state_of
from optimum_trn.patching.autotune import Space, autotune
from tests.distributed import run_ranks
from tests.models.tiny import tiny_model

SURFACE = json.loads((Path(__file__).parent / "data" / "slapo_autotune_surface.json").read_text())


def measured(batch_size, checkpoint_ratio):
    row = SURFACE["samples_per_second"][SURFACE["batch_size"].index(batch_size)]
    return row[SURFACE["checkpoint_ratio"].index(checkpoint_ratio)] or None


def published_space(largest_batch):
    return (
        Space()
        .choice("batch_size", range(96, largest_batch + 1, 8))
        .choice("checkpoint_ratio", SURFACE["checkpoint_ratio"])
    )


@pytest.mark.parametrize("largest_batch", [176, 192])
def test_the_optimum_of_the_published_surface_is_found_in_at_most_29_of_91_evaluations(largest_batch):
    tuning = autotune(measured, published_space(largest_batch))
    assert tuning.best.score == 130.9 == max(map(max, SURFACE["samples_per_second"]))
    assert tuning.best.chosen == {"batch_size": 144, "checkpoint_ratio": 0.5}
    assert len(tuning.journal) <= 29
    assert len({tuple(evaluation.chosen.items()) for evaluation in tuning.journal}) == len(tuning.journal)
    assert tuning.complete


def test_the_journal_lists_every_evaluation_and_a_budget_ends_the_search():
    tuning = autotune(measured, published_space(192), budget=5)
    assert len(tuning.journal) == 5 and not tuning.complete
    assert tuning.best.score == 126.9
    text = str(tuning)
    assert "batch_size 192, checkpoint_ratio 0.84: 126.9" in text
    assert "batch_size 192, checkpoint_ratio 0.67: out of memory" in text
    assert "5 evaluations, the budget, was not enough" in text
    assert autotune(measured, published_space(192), budget=29).complete


def test_later_choices_depend_on_earlier_ones():
    space = (
        Space()
        .choice("ranks", [2, 4])
        .choice("batch_size", lambda chosen: [chosen["ranks"] * rows for rows in (1, 2, 3)])
        .choice("micro_batch_size", lambda chosen: [size for size in range(1, 9) if chosen["batch_size"] % size == 0])
    )
    tried = []

    def evaluate(ranks, batch_size, micro_batch_size):
        tried.append((ranks, batch_size, micro_batch_size))
        if micro_batch_size > 3:
            raise torch.OutOfMemoryError("full")
        return ranks * micro_batch_size - batch_size / 100

    tuning = autotune(evaluate, space)
    assert tuning.best.chosen == {"ranks": 4, "batch_size": 12, "micro_batch_size": 3}
    assert all(batch % micro == 0 and batch % ranks == 0 for ranks, batch, micro in tried)
    assert (2, 6, 6) in tried and (4, 12, 6) not in tried, "4 did not fit, so 6 was not to be tried"

    with pytest.raises(PlanError, match="b depends on 'c', but is chosen after"):
        autotune(evaluate, Space().choice("b", lambda chosen: [chosen["c"]]).choice("c", [1]))
    with pytest.raises(PlanError, match="has a choice 'b' already"):
        Space().choice("b", [1]).choice("b", [2])


def test_one_choice_is_a_space_and_one_in_which_nothing_fits_is_refused_with_the_last_attempt():
    assert autotune(lambda size: float(size), Space().choice("size", [1, 2, 3])).best.chosen == {"size": 3}
    tuning = autotune(lambda size: None, Space().choice("size", [1, 2, 3]))
    assert len(tuning.journal) == 1
    with pytest.raises(PlanError, match="None of the 1 choices .* {'size': 1}. Extend the space towards less memory"):
        print(tuning.best)


def tuned(rank, world_size):
    schedule = Schedule(tiny_model("llama", torch.float32, num_hidden_layers=4), ParallelConfig(2).build_mesh())
    get_plan("llama").record(schedule)
    space = Space().choice("recomputed", [1.0, 0.75, 0.5, 0.25])

    def record(schedule, chosen):
        schedule["model.layers.*"].checkpoint(chosen["recomputed"])

    def measure(model, chosen):
        kept = sum(not layer.gradient_checkpointing for layer in model.model.layers)
        if kept == 3 and rank == 1:
            raise torch.OutOfMemoryError("full on this rank only")
        return kept + rank

    tuning = schedule.autotune(space, record, measure)
    assert state_of(schedule.model) is None
    assert "checkpoint" not in str(schedule)
    return [(evaluation.chosen, evaluation.score) for evaluation in tuning.journal], tuning.best.chosen


def test_a_schedule_is_tuned_alike_on_all_ranks_by_the_worst_of_them():
    mine, yours = run_ranks(tuned, 2, device="cpu")
    assert mine == yours
    journal, best = mine
    assert [score for _, score in journal] == [0, 1, 2, None] and best == {"recomputed": 0.5}
