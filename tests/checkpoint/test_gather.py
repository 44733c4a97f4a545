"""Blocks that arrive at the first rank make up the global tensor, whatever the placement."""

from unittest.mock import patch

import pytest
import torch

from optimum_trn.checkpoint import gather
from optimum_trn.parallel import ParallelConfig, Piece, Placement
from tests.devices import NEURON_FIRST, local_device
from tests.distributed import run_ranks

FULL = torch.arange(7 * 12.0).reshape(7, 12)
PLACEMENTS = {
    "rows": Placement.split((8, 6), 2, 0),
    "columns": Placement.split((7, 12), 2, 1),
    "replicated": Placement.replicate((7, 12), 2),
    "scalar": Placement.replicate((), 2),
    "vector": Placement.split((84,), 2, 0),
    "interleaved, padded": Placement(
        (7, 12), 2, 0, ((Piece(0, 2), Piece(4, 2)), (Piece(2, 2), Piece(6, 1), Piece(None, 1)))
    ),
    "replicas": Placement((7, 12), 2, 1, ((Piece(0, 4), Piece(8, 4)), (Piece(4, 4), Piece(8, 4)))),
}


def gathered(rank, world_size):
    with patch.object(gather, "BLOCK_BYTES", 100):  # two rows, so that there are several blocks
        return gathered_in_blocks(rank, ParallelConfig(world_size).build_mesh().get_group("tp"))


def gathered_in_blocks(rank, group):
    results = {}
    for name, placement in PLACEMENTS.items():
        full = torch.arange(float(torch.Size(placement.global_shape).numel())).reshape(placement.global_shape)
        local = placement.shard(full, rank).to(local_device())
        blocks = list(gather.blocks(gather.Gathered(local, placement, group), group))
        if rank == 0:
            results[name] = (
                len(blocks),
                torch.equal(torch.cat([block.reshape(-1) for block in blocks]), full.reshape(-1)),
            )
        else:
            assert all(block is None for block in blocks)
    return results


@pytest.mark.parametrize("device", NEURON_FIRST)
def test_the_first_rank_gets_the_whole_tensor_in_bounded_blocks(device):
    results = run_ranks(gathered, 2, device=device)[0]
    assert results.keys() == PLACEMENTS.keys()
    for name, (blocks, equal) in results.items():
        assert equal, name
        assert blocks > 1 or name == "scalar", name


def test_replicas_are_sent_once():
    assert gather.runs(PLACEMENTS["replicas"]) == [(0, 0, 4), (1, 0, 4), (0, 4, 4)]
    assert gather.runs(PLACEMENTS["interleaved, padded"]) == [(0, 0, 2), (1, 0, 2), (0, 2, 2), (1, 2, 1)]
