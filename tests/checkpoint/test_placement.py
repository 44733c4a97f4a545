"""The probability that memory checkpoints survive equals counting; Gemini's published arithmetic is reproduced."""

import math
from itertools import combinations

import pytest

from optimum_trn.checkpoint.placement import mixed_placement, recovery_bound, ring_placement
from optimum_trn.elastic.headlines import headlines
from optimum_trn.elastic.intervals import daly_interval, wasted_seconds, young_interval
from optimum_trn.errors import PlanError


def enumerated(placement, lost):
    """The share of all losses of so many machines of which every machine's copies survive."""
    sets = list(combinations(range(placement.machines), lost))
    holders = [set(placement.holders(machine)) for machine in range(placement.machines)]
    return sum(not any(copies <= set(gone) for copies in holders) for gone in sets) / len(sets)


@pytest.mark.parametrize("place", [mixed_placement, ring_placement])
@pytest.mark.parametrize("largest", [9, pytest.param(18, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_probability_equals_exhaustive_enumeration(place, largest):
    for machines in range(1, largest + 1):
        for replicas in range(1, min(4, machines) + 1):
            placement = place(machines, replicas)
            for lost in range(machines + 1):
                assert placement.recovery_probability(lost) == enumerated(placement, lost), (machines, replicas, lost)


def test_known_probabilities():
    expected = {
        (16, 2, 2): 0.933333,
        (16, 2, 3): 0.8,
        (16, 2, 4): 0.615385,
        (128, 2, 2): 0.992126,
        (1000, 2, 2): 0.998999,
        (16, 3, 3): 0.985714,
        (15, 2, 2): 0.914286,
    }
    for (machines, replicas, lost), probability in expected.items():
        assert mixed_placement(machines, replicas).recovery_probability(lost) == pytest.approx(probability, abs=1e-6)
    assert ring_placement(16, 2).recovery_probability(2) == pytest.approx(0.866667, abs=1e-6)


def test_bound_holds_where_copies_divide_machines_and_the_gap_is_geminis_where_not():
    for replicas in range(2, 7):
        for machines in range(replicas, 60):
            placement = mixed_placement(machines, replicas)
            for lost in range(replicas, min(machines, replicas + 4) + 1):
                if machines % replicas == 0:
                    assert placement.recovery_probability(lost) >= recovery_bound(machines, replicas, lost) - 1e-12
            sets = round((1 - placement.recovery_probability(replicas)) * math.comb(machines, replicas))
            assert sets - -(-machines // replicas) <= max(0, 2 * replicas - 3)


def test_every_machine_has_its_copies_on_as_many_machines_and_all_hold_as_many():
    for machines in range(1, 30):
        for replicas in range(1, min(5, machines) + 1):
            placement = mixed_placement(machines, replicas)
            held = [0] * machines
            for machine in range(machines):
                holders = placement.holders(machine)
                assert holders[0] == machine and len(set(holders)) == replicas
                for holder in holders:
                    held[holder] += 1
            assert set(held) == {replicas}


def test_what_survives_is_what_the_probability_counts():
    placement = mixed_placement(7, 2)
    assert not placement.survives([0, 1]) and placement.survives([1, 2]) and placement.survives([4, 2, 1])
    assert not placement.survives([4, 6])  # the ring of the last three


def test_more_copies_than_machines_are_refused():
    with pytest.raises(PlanError, match="3 copies .* there are 2"):
        mixed_placement(2, 3)


def test_published_arithmetic():
    ours = {headline.name: headline.ours for headline in headlines()}
    assert list(ours.values()) == pytest.approx([42.4, 106, 480, 7.74, 12.70, 320, 93.33], rel=1e-3)


def test_intervals():
    assert young_interval(8, 100) == 40
    assert daly_interval(1e-9, 100) == pytest.approx(young_interval(1e-9, 100), rel=1e-4)
    assert daly_interval(10, 4) == 4
    costs = {interval: 8 / interval + interval / 2 / 1e4 for interval in range(100, 1000)}
    assert min(costs, key=costs.get) == pytest.approx(young_interval(8, 1e4), abs=1)
    assert wasted_seconds(10, 1, 3) == 18  # an interval is no shorter than a checkpoint
