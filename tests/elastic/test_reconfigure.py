"""Whatever is lost, up to what was promised: every survivor works, in a pipeline that has a template."""

import random
from itertools import accumulate, pairwise

import pytest

from optimum_trn.elastic.reconfigure import Copy, NoPipelineError, copies, reconfigure
from optimum_trn.elastic.templates import template_sizes
from optimum_trn.errors import CheckpointError


def random_pipelines(draw, nodes, sizes, losses):
    """A covering of all nodes, of more pipelines than losses."""
    counts = [sizes[0]] * (losses + 1)
    for _ in range(nodes - sum(counts)):
        candidates = [place for place, count in enumerate(counts) if count < sizes[-1]]
        place = draw.choice(candidates)
        counts[place] += 1
        if counts[place] >= 2 * sizes[0] and draw.random() < 0.3:
            counts[place] -= sizes[0]
            counts.append(sizes[0])
    bounds = [0, *accumulate(counts)]
    return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))


def check(pipelines, alive, sizes, losses):
    used = [node for pipeline in pipelines for node in pipeline]
    assert sorted(used) == sorted(alive)  # everyone, once
    assert all(len(pipeline) in sizes for pipeline in pipelines)
    assert all(list(pipeline) == sorted(pipeline) for pipeline in pipelines)  # as the ranks of a group are
    if len(alive) >= (losses + 1) * sizes[0]:
        assert len(pipelines) >= losses + 1


def run_losses(sequences, returns):
    draw = random.Random(3)
    actions = set()
    for _ in range(sequences):
        minimum, losses = draw.randint(1, 6), draw.randint(0, 4)
        nodes = (losses + 1) * minimum + draw.randint(0, 12)
        sizes = template_sizes(nodes, minimum, losses)
        pipelines = random_pipelines(draw, nodes, sizes, losses)
        alive = set(range(nodes))
        check(pipelines, alive, sizes, losses)
        fresh = nodes
        for _ in range(draw.randint(1, 6)):
            lost = draw.sample(sorted(alive), min(len(alive), draw.randint(0, max(losses, 1))))
            room = nodes - len(alive) + len(lost)
            joined = list(range(fresh, fresh + draw.randint(0, room))) if returns else []
            fresh += len(joined)
            copies_before = len(pipelines)
            alive = alive - set(lost) | set(joined)
            if len(alive) < minimum:
                with pytest.raises(NoPipelineError):
                    reconfigure(pipelines, lost, minimum, sizes, losses, joined)
                break
            whole = [pipeline for pipeline in pipelines if not set(pipeline) & set(lost)]
            if copies_before > len(lost):
                assert whole  # so every layer has a survivor
            found = reconfigure(pipelines, lost, minimum, sizes, losses, joined)
            assert found == reconfigure(pipelines, set(lost), minimum, sizes, losses, joined)
            check(found.pipelines, alive, sizes, losses)
            pipelines = found.pipelines
            actions |= set(found.actions)
    return actions


def test_after_losses_every_survivor_is_used_and_copies_are_restored_where_nodes_are_enough():
    assert run_losses(2000, returns=False) == {"shrink", "borrow", "merge", "recompose"}


def test_nodes_that_come_back_are_folded_in():
    assert run_losses(1000, returns=True) == {"shrink", "borrow", "merge", "recompose", "join"}


@pytest.mark.full
def test_hundred_thousand_sequences_of_losses():
    run_losses(100_000, returns=False)


def test_each_way_of_rebuilding_does_what_it_says():
    sizes = template_sizes(8, 2, 1)  # 2 to 6 nodes
    assert reconfigure([(0, 1, 2), (3, 4)], [1], 2, sizes, 1).actions == ("shrink",)
    borrowed = reconfigure([(0, 1, 2), (3, 4)], [4], 2, sizes, 1)
    assert borrowed.pipelines == ((0, 1), (2, 3)) and borrowed.actions == ("borrow",)
    merged = reconfigure([(0, 1), (2, 3), (4, 5)], [1], 2, sizes, 1)
    assert merged.pipelines == ((0, 2, 3), (4, 5)) and merged.actions == ("merge",)
    # A whole pipeline has gone, and none lacks a node: only a split gives two copies again.
    split = reconfigure([(0, 1), (2, 3, 4, 5)], [0, 1], 2, sizes, 1)
    assert split.pipelines == ((2, 3), (4, 5)) and split.actions == ("recompose",)


def test_no_more_pipelines_are_made_than_a_step_can_feed():
    sizes = template_sizes(8, 2, 1)
    found = reconfigure([(0, 1), (2, 3)], [], 2, sizes, 1, joined=[4, 5, 6], most=2)
    assert sorted(map(len, found.pipelines)) == [3, 4]


def test_missing_pieces_come_from_all_that_hold_them_in_equal_parts():
    sizes = {f"layer{place}": 64 for place in range(16)}
    held = {node: list(sizes) for node in range(4)}
    found = copies(sizes, held, {**held, 9: list(sizes)})
    load = {node: sum(sizes[copy.piece] for copy in found if copy.source == node) for node in held}
    assert load == dict.fromkeys(range(4), 256)  # a quarter of the 1024 that one source would send
    assert copies(sizes, {0: ["layer0"]}, {0: ["layer0"], 1: ["layer0"]}) == [Copy("layer0", 0, 1)]
    with pytest.raises(CheckpointError, match="layer1 is on none of the 1 nodes"):
        copies(sizes, {0: ["layer0"]}, {0: ["layer0", "layer1"]})
