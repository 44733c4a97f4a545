"""The failure simulator books every second once, equals runs computed by hand, and shows Oobleck's shares."""

import pytest

from optimum_trn.elastic import published
from optimum_trn.elastic.comparison import compare, crossover
from optimum_trn.elastic.failure_clock import FixedClock, PoissonClock, TraceClock
from optimum_trn.elastic.policies import Bamboo, Elastic, MemoryCheckpoints, RestartFromCheckpoint, Tier, Varuna
from optimum_trn.elastic.simulator import Job, simulate

JOB = Job("job", 100.0, lambda nodes: 80 / nodes, nodes=8)


def memory(**changes):
    fields = dict(replicas=2, memory_steps=1, retrieval_seconds=1.0, restart_seconds=lambda nodes: 5.0)
    return MemoryCheckpoints(**{**fields, "checkpoint_steps": 3, "checkpoint_seconds": 2.0, **changes})


def test_restarting_loses_what_came_after_the_checkpoint_and_waits_for_the_node():
    # 3 steps of 10 s and a checkpoint of 4 s: 34, 68, then two whole steps and half of one until 93.
    policy = RestartFromCheckpoint(3, 4.0, lambda nodes: 7.0)
    outcome = simulate(JOB, policy, FixedClock(93.0), until=93 + 20 + 7 + 10, replacement_seconds=20.0)
    assert outcome.seconds == pytest.approx(
        {"effective": 70, "redundant": 0, "lost": 25, "checkpoint": 8, "recovery": 7, "idle": 20}
    )
    assert outcome.samples == 700 and outcome.failures == 1 and outcome.tiers[Tier.PERSISTENT.value] == 1


def test_elastic_loses_the_step_under_way_and_goes_on_with_fewer():
    outcome = simulate(JOB, Elastic(1, 2.0, memory()), FixedClock(15.0), until=15 + 2 + 80 / 7)
    assert outcome.seconds["effective"] == pytest.approx(10 + 80 / 7)
    assert (outcome.seconds["lost"], outcome.seconds["recovery"]) == pytest.approx((5, 2))


def test_a_lost_group_falls_back_to_the_persistent_checkpoint(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,event,nodes\n45,remove,8\n45,add,4\n")  # of one moment: four are lost
    policy = memory(replicas=1, waits_for_nodes=False)
    outcome = simulate(JOB, policy, TraceClock(trace), until=46)
    assert outcome.tiers[Tier.PERSISTENT.value] == 1
    assert outcome.samples == 300 and outcome.seconds["lost"] == pytest.approx(15)
    assert simulate(JOB, memory(), FixedClock(45), until=46).samples == 400  # one of a group: from memory


def test_neighbours_end_redundant_computation():
    bamboo = Bamboo(1.0, 3.0, 10, 0.0, lambda nodes: 5.0)
    assert bamboo.recover(8, frozenset({2}), frozenset()).tier is Tier.STEP
    assert bamboo.recover(8, frozenset({0}), frozenset({7})).tier is Tier.PERSISTENT
    assert simulate(JOB, bamboo, FixedClock(1e9), until=20.0).share("redundant") == 0.5


@pytest.mark.parametrize("clock", [FixedClock(37.0), PoissonClock(50.0, seed=3)])
@pytest.mark.parametrize(
    "policy",
    [
        RestartFromCheckpoint(3, 4.0, lambda nodes: 7.0),
        Varuna(3, 4.0, lambda nodes: 7.0),
        memory(),
        Elastic(1, 2.0, memory()),
        Bamboo(0.5, 3.0, 3, 1.0, lambda nodes: 7.0),
    ],
)
def test_every_second_is_booked_once_and_progress_is_what_was_effective(policy, clock):
    outcome = simulate(JOB, policy, clock, until=1000.0, replacement_seconds=25.0)
    assert outcome.total == pytest.approx(1000.0)
    assert all(seconds >= -1e-9 for seconds in outcome.seconds.values())
    assert outcome.failures > 10
    again = simulate(JOB, policy, clock, until=1000.0, replacement_seconds=25.0)
    assert again.as_dict() == outcome.as_dict()


def test_published_shares_of_oobleck_and_varuna():
    job, clock = published.job("bert-large"), FixedClock(published.PERIODS["10m"])
    nodes = published.FEWEST_NODES
    oobleck = simulate(job, published.oobleck("bert-large"), clock, until_nodes=nodes)
    varuna = simulate(job, published.varuna("bert-large"), clock, until_nodes=nodes)
    assert oobleck.share("effective") == pytest.approx(published.EFFECTIVE["Oobleck"], abs=0.03)
    assert varuna.share("effective") == pytest.approx(published.EFFECTIVE["Varuna-like"], abs=0.08)
    assert oobleck.failures == varuna.failures == 15


@pytest.mark.full
def test_ranking_at_all_periods_and_crossover_at_the_best_interval():
    job = published.job("bert-large")
    clocks = [FixedClock(seconds) for seconds in (*published.PERIODS.values(), 604800.0)]
    rows = compare(
        job,
        published.oobleck("bert-large"),
        [lambda steps: published.varuna("bert-large", steps), lambda steps: published.bamboo("bert-large", steps)],
        published.VARUNA_CHECKPOINT_STEPS,
        clocks,
        lambda policy, clock: simulate(job, policy, clock, until_nodes=published.FEWEST_NODES),
    )
    assert all(row.ranking == ["Oobleck", "Varuna-like", "Bamboo-like"] for row in rows)
    for row in rows:
        assert row.best["Varuna-like"].outcome.goodput >= row.given["Varuna-like"].goodput
    assert crossover(rows, "Varuna-like") == (604800.0, None)
    assert crossover(rows, "Bamboo-like") == (None, None)


def test_ten_thousand_nodes():
    job = Job("large", 1.0, lambda nodes: 60 * 10_000 / nodes, 10_000, 5_000)
    outcome = simulate(job, Elastic(1, 2.0, memory()), PoissonClock(600.0), until=86400.0, replacement_seconds=600.0)
    assert outcome.failures > 100 and outcome.share("effective") > 0.9


def test_what_is_no_trace_or_clock_is_refused(tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("600,explode,1\n")
    with pytest.raises(ValueError, match=r"bad.csv:1: '600,explode,1' is no line of a trace"):
        TraceClock(bad)
    with pytest.raises(ValueError, match="give more than 0"):
        FixedClock(0)
    with pytest.raises(ValueError, match="needs an end"):
        simulate(JOB, memory(), FixedClock(1.0))
