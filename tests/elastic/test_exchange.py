"""State goes from those that hold it to those that lack it, all at once, whatever its shape."""

import torch

from optimum_trn.elastic.exchange import exchange
from optimum_trn.elastic.reconfigure import copies
from tests.distributed import run_ranks

SIZES = {"first": 40, "second": 8, "third": 400}


def state_of(piece):
    size = SIZES[piece]
    weight = torch.arange(size, dtype=torch.float64).view(2, -1)
    moments = {"step": torch.tensor(3.0), "exp_avg": -weight.float(), "amsgrad": False}
    return {"tensors": {"weight": weight, "flags": torch.tensor([True, False])}, "optimizer": {"weight": moments}}


def received(rank, world_size):
    held = {0: list(SIZES), 1: ["second", "third"], 2: []}
    planned = copies(SIZES, held, dict.fromkeys(range(3), list(SIZES)))
    return {copy.source for copy in planned}, dict(exchange(rank, planned, state_of))


def test_every_rank_gets_what_it_lacks_and_several_send():
    results = run_ranks(received, 3, device="cpu")
    assert [sorted(pieces) for _, pieces in results] == [[], ["first"], ["first", "second", "third"]]
    assert results[0][0] == {0, 1}
    for _, pieces in results:
        for piece, state in pieces.items():
            torch.testing.assert_close(state, state_of(piece), rtol=0, atol=0)
