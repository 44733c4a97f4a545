"""Pipelines of a number of nodes, and their micro-batches: as fast as the best of all that there are."""

import random
from itertools import product

import pytest

from optimum_trn.elastic.instantiate import distribute, instantiate, slowest_seconds
from optimum_trn.elastic.templates import make_templates, template_sizes
from optimum_trn.errors import PlanError


def shares(micro_batches, pipelines):
    if pipelines == 1:
        yield (micro_batches,)
        return
    for first in range(1, micro_batches - pipelines + 2):
        for rest in shares(micro_batches - first, pipelines - 1):
            yield (first, *rest)


def coverings(nodes, sizes, largest=None):
    if nodes == 0:
        yield ()
    for size in sizes:
        if size <= min(nodes, largest or nodes):
            for rest in coverings(nodes - size, sizes, size):
                yield (size, *rest)


def fastest_share(micro_batches, pipelines):
    return min(slowest_seconds(pipelines, counts) for counts in shares(micro_batches, len(pipelines)))


def random_case(draw):
    losses, minimum = draw.randint(0, 2), draw.randint(1, 3)
    nodes = (losses + 1) * minimum + draw.randint(0, 3)
    sizes = template_sizes(nodes, minimum, losses)
    layers = [draw.randint(1, 30) for _ in range(sizes[-1] + draw.randint(0, 4))]
    return nodes, losses, minimum, make_templates(layers, sizes)


def test_micro_batches_are_shared_out_as_brute_force_would_in_300_random_cases():
    draw = random.Random(1)
    for _ in range(300):
        templates = random_case(draw)[3]
        pipelines = [draw.choice(list(templates.values())) for _ in range(draw.randint(1, 4))]
        micro_batches = len(pipelines) + draw.randint(0, 7)
        counts = distribute(micro_batches, pipelines)
        assert sum(counts) == micro_batches and min(counts) >= 1
        assert slowest_seconds(pipelines, counts) == fastest_share(micro_batches, pipelines)


def test_pipelines_are_as_fast_as_the_best_of_all_that_use_every_node_in_300_random_cases():
    draw = random.Random(2)
    for _ in range(300):
        nodes, losses, _, templates = random_case(draw)
        micro_batches = losses + 1 + draw.randint(0, 6)
        sizes = instantiate(nodes, losses, micro_batches, templates)
        assert sum(sizes) == nodes and losses + 1 <= len(sizes) <= micro_batches
        times = {
            chosen: fastest_share(micro_batches, [templates[size] for size in chosen])
            for chosen in coverings(nodes, templates)
            if losses < len(chosen) <= micro_batches
        }
        assert times[tuple(sizes)] == min(times.values())


def test_sixty_nodes_are_a_matter_of_a_moment():
    templates = make_templates([1.0] * 60, template_sizes(60, 8, 3))
    sizes = instantiate(60, 3, 32, templates)
    assert sum(sizes) == 60 and len(sizes) >= 4


def test_too_few_micro_batches_are_refused_with_their_numbers():
    templates = make_templates([1.0] * 4, range(1, 4))
    with pytest.raises(PlanError, match="2 micro-batches does not feed 3 pipelines"):
        distribute(2, [templates[1]] * 3)
    with pytest.raises(PlanError, match="2 micro-batches a step make at most 2 pipelines"):
        instantiate(6, 2, 2, templates)


def test_shares_and_coverings_of_the_oracle_are_complete():
    for micro_batches, pipelines in product(range(1, 7), range(1, 4)):
        expected = [c for c in product(range(1, micro_batches + 1), repeat=pipelines) if sum(c) == micro_batches]
        assert sorted(shares(micro_batches, pipelines)) == expected
    assert sorted(coverings(6, [2, 3, 4])) == [(2, 2, 2), (3, 3), (4, 2)]
