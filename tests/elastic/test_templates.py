"""Pipeline templates: cuts are as fast as the best of all cuts, and their sizes cover every number of nodes."""

import random
from itertools import combinations, pairwise

import pytest

from optimum_trn.elastic.templates import (
    best_cut,
    iteration_seconds,
    make_templates,
    minimum_nodes,
    template_sizes,
)
from optimum_trn.errors import PlanError


def seconds_of(layers, ends):
    return [sum(layers[start:end]) for start, end in pairwise((0, *ends))]


def brute_force(layers, num_stages):
    count = len(layers)
    cuts = [(*inner, count) for inner in combinations(range(1, count), num_stages - 1)]
    return min(iteration_seconds(seconds_of(layers, ends), 4 * num_stages) for ends in cuts)


def test_cuts_equal_brute_force_in_300_random_cases():
    draw = random.Random(0)
    for case in range(300):
        count = draw.randint(1, 10)
        # Few values, so that many stages are equally slow, and many of them.
        layers = [draw.randint(1, draw.choice([3, 1000])) for _ in range(count)]
        if case % 3 == 0:
            layers = [seconds / 7 for seconds in layers]
        num_stages = draw.randint(1, count)
        ends = best_cut(layers, num_stages)
        assert len(ends) == num_stages and ends[-1] == count
        assert all(start < end for start, end in pairwise((0, *ends)))
        found = iteration_seconds(seconds_of(layers, ends), 4 * num_stages)
        assert found == pytest.approx(brute_force(layers, num_stages), rel=1e-12)


def test_equal_stages_take_the_time_that_is_known_of_1f1b():
    for stages in range(1, 9):
        for micro_batches in range(stages, 40):
            assert iteration_seconds([3] * stages, micro_batches) == 3 * (micro_batches + stages - 1)


def test_sizes_are_consecutive_and_every_number_of_nodes_is_a_sum_of_more_of_them_than_losses():
    for minimum in range(1, 9):
        for losses in range(5):
            least = (losses + 1) * minimum
            for nodes in range(least, least + 12):
                sizes = template_sizes(nodes, minimum, losses)
                reached = [{0}]
                for _ in range(nodes // minimum):
                    reached.append({total + size for total in reached[-1] for size in sizes if total + size <= nodes})
                for left in range(least, nodes + 1):
                    assert any(left in totals for totals in reached[losses + 1 :])


def test_templates_share_all_layers_over_all_devices():
    templates = make_templates([1.0] * 12, range(2, 5), devices_per_node=2)
    assert {nodes: len(template.seconds) for nodes, template in templates.items()} == {2: 4, 3: 6, 4: 8}
    for template in templates.values():
        stages = [template.layers_of(stage) for stage in range(len(template.ends))]
        assert [layer for stage in stages for layer in stage] == list(range(12))


def test_what_no_template_can_serve_is_refused_with_its_numbers():
    with pytest.raises(PlanError, match="6 nodes, but there are 5"):
        template_sizes(5, 2, 2)
    with pytest.raises(PlanError, match="4 nodes of 2 devices, 8 stages, but the model has 7 layers"):
        make_templates([1.0] * 7, range(2, 5), devices_per_node=2)


def test_the_minimum_is_the_first_number_of_nodes_with_room():
    assert minimum_nodes([30, 16, 11], 16) == 2
    with pytest.raises(PlanError, match="no pipeline of up to 3 nodes"):
        minimum_nodes([30, 16, 11], 10)
