"""Ring attention on its own: equal work on every rank, gradients that belong to what was computed, bytes that move."""

from collections import Counter

import pytest
import torch

from optimum_trn.parallel.context import ContextLayout
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.ring import RingMask, Scoring, ring_attention
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks


class Place:
    """What a layout needs of a group, without one."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def causal(row, head, query, key):
    return key <= query


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_ranks_compute_equally_many_pairs_of_chunks_in_every_step(size):
    for step in range(size):
        work = Counter()
        for rank in range(size):
            layout = ContextLayout(Place(rank, size), 16 * size)
            mask = RingMask(layout, 1, causal, is_causal=True)
            for queries in layout.chunks_of(rank):
                work[rank] += sum(not mask.hides(queries, keys) for keys in layout.chunks_of((rank - step) % size))
        assert set(work.values()) == {3 if step == 0 else 2}


def test_chunks_out_of_a_window_are_left_out():
    mask = RingMask(ContextLayout(Place(0, 4), 80), 1, causal, is_causal=True, window=11)
    assert [keys for keys in range(8) if not mask.hides(5, keys)] == [
        3,
        4,
        5,
    ]  # 10 tokens each; the last of 3 is 11 away


def gradients(rank, world_size):
    """Numerical against analytical gradients, with dropout, a cap, sinks, padding and one query that sees nothing."""
    import torch.distributed as dist

    device = local_device()
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    real = torch.ones(2, 6, dtype=torch.bool, device=device)
    real[0, 0] = False
    layout = ContextLayout(RankGroup(dist.group.WORLD), 6, real)
    mask = RingMask(layout, 2, causal, is_causal=True)
    query, key, value, sinks = random(2, 4, 6, 3), random(2, 2, 6, 3), random(2, 2, 6, 5), random(4)
    scoring = Scoring(0.7, softcap=2.0, dropout=0.4, seed=5)
    output = ring_attention(query, key, value, mask, scoring, sinks)
    assert output.shape == (2, 4, 6, 5) and not output[0, :, 0].any()
    assert torch.autograd.gradcheck(
        lambda *inputs: ring_attention(*inputs[:3], mask, scoring, inputs[3]), (query, key, value, sinks)
    )
    return True


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_what_was_computed(device):
    assert run_ranks(gradients, 1, device=device, environment=FLOAT64) == [True]
