"""The simulated pool: routing to where models are costs no throughput, and cores are busy when they can be."""

from dataclasses import replace

import pytest

from optimum_trn.pool.routing import SLACK, CoreCache, Router
from optimum_trn.pool.simulator import GB, Scenario, host_memory, simulate

LINK_PER_CORE = Scenario(cores_per_server=1, host_cache=0.0, requests=3_000)


@pytest.mark.parametrize("scenario", [LINK_PER_CORE, Scenario(requests=3_000)], ids=["link per core", "shared link"])
@pytest.mark.parametrize(
    "zipf", [pytest.param(0.0, marks=pytest.mark.full), 0.9, pytest.param(0.99, marks=pytest.mark.full)]
)
def test_cache_aware_is_never_below_least_loaded(scenario, zipf):
    aware = simulate(replace(scenario, zipf=zipf))
    least = simulate(replace(scenario, zipf=zipf, policy="least loaded"))
    assert aware.throughput >= least.throughput and aware.hit_rate >= least.hit_rate
    if scenario is LINK_PER_CORE:
        assert aware.utilisation >= 0.95


def test_a_pool_needs_an_eighth_of_the_host_memory_for_128_models_and_a_250th_for_a_terabyte_of_them():
    assert host_memory(128) / (4.1 * GB) == pytest.approx(8, rel=0.1)
    assert 1024 * GB / (4.1 * GB) == pytest.approx(250, rel=0.01)


def test_training_takes_the_idle_share_and_gives_it_back():
    quiet = replace(LINK_PER_CORE, arrivals=200.0, requests=2_000)
    alone, shared = simulate(quiet), simulate(replace(quiet, training_step=20e-3))
    assert shared.training > 0.8 * (1 - shared.utilisation) - 0.1 and shared.training > 0.3
    assert shared.p99 < alone.p99 + 20e-3 + 2 * quiet.training_switch + 30e-3


def test_a_router_prefers_the_holder_then_the_last_that_evicted_then_the_shortest_queue():
    cores = [CoreCache(0, 2), CoreCache(1, 2)]
    router = Router(cores)
    first, hit, _ = router.route("a", 1)
    assert (first.index, hit) == (0, False)
    assert router.route("a", 1)[:2] == (cores[0], True)  # though core 1 is idle
    assert router.route("b", 1)[0] is cores[1]
    for _ in range(2):
        assert router.route("c", 1)[0] in cores
    while cores[0].queue:
        router.done(cores[0])
    while cores[1].queue:
        router.done(cores[1])
    holder = next(core for core in cores if "a" in core.resident)
    holder.admit("x", 2)  # as another router would
    router._evicted_from["a"] = cores[1]
    assert router.route("a", 1)[0] is cores[1]


def test_a_router_never_lets_one_queue_grow_while_others_are_short():
    cores = [CoreCache(index, 10) for index in range(4)]
    router = Router(cores)
    for _ in range(100):
        router.route("popular", 1)
        assert max(core.queue for core in cores) - min(core.queue for core in cores) <= SLACK + 1
    with pytest.raises(ValueError, match="no policy"):
        Router(cores, "other")
