"""The pipeline's timeline keeps the order of its schedule, and its shortcuts keep its length."""

import pytest

from optimum_trn.planning.timeline import least_seconds, step_seconds, timeline

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


def stages_of(schedule, ranks):
    return ranks * (2 if schedule == "interleaved_1f1b" else 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_that_of_the_literature(schedule):
    ranks, micro_batches = 4, 12
    seconds = step_seconds(schedule, ranks, micro_batches, [1.0] * ranks, [2.0] * ranks, 0.0)
    assert seconds == pytest.approx((micro_batches + ranks - 1) * 3.0)  # Narayanan et al. 2021, section 2.2


def test_interleaving_halves_the_bubble_and_zero_bubble_thirds_it():
    ranks, micro_batches = 4, 12
    work = micro_batches * 3.0
    half = step_seconds("interleaved_1f1b", ranks, micro_batches, [0.5] * 8, [1.0] * 8, 0.0)
    assert half - work == pytest.approx((ranks - 1) * 3.0 / 2)
    none = step_seconds("zero_bubble", ranks, micro_batches, [1.0] * ranks, [2.0] * ranks, 0.0)
    assert none - work == pytest.approx((ranks - 1) * 3.0 / 3)  # F + B - W of Qi et al. 2023, equal thirds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_action_starts_before_what_it_needs_and_no_rank_does_two_things(schedule):
    ranks, micro_batches, transfer = 3, 7, 0.25
    stages = stages_of(schedule, ranks)
    spans = timeline(schedule, ranks, micro_batches, [1.0] * stages, [2.0] * stages, transfer)
    ends = {(s.action.kind, s.action.stage, s.action.micro_batch): s.end for own in spans for s in own}
    for own in spans:
        for before, after in zip(own, own[1:], strict=False):
            assert after.start >= before.end
        for span in own:
            if span.action.kind == "forward" and span.action.stage:
                assert span.start >= ends["forward", span.action.stage - 1, span.action.micro_batch] + transfer
    assert sum(len(own) for own in spans) == stages * micro_batches * (3 if schedule == "zero_bubble" else 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [8, 61])
def test_a_long_step_is_as_long_as_it_is_when_played_and_its_bound_is_below(schedule, micro_batches):
    ranks = 4
    stages = stages_of(schedule, ranks)
    forward = [1.0 + 0.1 * (stage % 3) for stage in range(stages)]
    backward = [2 * seconds for seconds in forward]
    arguments = schedule, ranks, micro_batches, forward, backward, 0.05
    played = max(own[-1].end for own in timeline(*arguments))
    assert step_seconds(*arguments) == pytest.approx(played, rel=0.01)
    assert least_seconds(*arguments) <= played + 1e-9
