"""The groups that layers are moved in: as good as trying all partitions."""

import itertools
import random

import pytest

from optimum_trn.pool.grouping import Layer, Stages, early_groups, equal_groups, grouped, plan_groups, progress


def best_of_all_partitions(layers, stages):
    def partitions(count):
        for cuts in itertools.product((False, True), repeat=count - 1):
            ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [count]
            yield [end - start for start, end in zip([0, *ends], ends, strict=False)]

    return min(progress(grouped(layers, counts), stages).compute for counts in partitions(len(layers)))


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_as_good_as_the_best_of_all_partitions(seed):
    random_ = random.Random(seed)
    layers = [
        Layer(random_.choice([0.0, random_.uniform(1, 50)]), random_.uniform(0, 5))
        for _ in range(random_.randint(1, 10))
    ]
    stages = Stages(random_.uniform(1, 20), random_.uniform(1, 20), random_.uniform(0, 3), random_.uniform(0, 3))
    counts = plan_groups(layers, stages)
    assert sum(counts) == len(layers) and min(counts) > 0
    planned = progress(grouped(layers, counts), stages).compute
    assert planned == pytest.approx(best_of_all_partitions(layers, stages), rel=1e-12)


@pytest.mark.parametrize(
    "count, milliseconds", [(1, 69.3), (2, 49.7), (4, 39.9), (8, 35.0), (16, 32.5), (64, 30.7), (500, 44.3)]
)
def test_equal_groups_of_a_model_of_240_mb_have_the_published_times(count, milliseconds):
    stages = Stages(100e9 / 8, 12e9, network_latency=50e-6)
    time = progress(equal_groups(Layer(240e6, 30e-3), count), stages).compute
    assert time * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_the_first_group_is_the_smallest_where_layers_are_alike():
    layers = [Layer(240e6 / 32, 30e-3 / 32)] * 32
    stages = Stages(100e9 / 8, 12e9, network_latency=50e-6)
    counts = plan_groups(layers, stages)
    assert counts[0] == 1
    planned = progress(grouped(layers, counts), stages).compute
    assert planned <= min(progress(equal_groups(Layer(240e6, 30e-3), n), stages).compute for n in (1, 2, 4, 8, 16, 32))
    assert planned <= 1.05 * 30e-3


def test_early_groups_begin_with_one_layer_and_end_hardly_later():
    layers = [Layer(6e6, 1e-4)] * 10
    slow = Stages(100e6, 12e9, network_latency=1e-4)  # the network takes longer than all the rest
    best, early = plan_groups(layers, slow), early_groups(layers, slow)
    assert best[0] > 5 and early == [1] * 10
    ends = [progress(grouped(layers, counts), slow).compute for counts in (best, early)]
    assert ends[0] < ends[1] <= 1.02 * ends[0]
    dear = Stages(100e6, 12e9, network_latency=0.1)
    assert early_groups(layers, dear) == plan_groups(layers, dear)
