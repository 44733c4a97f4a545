"""Placements: any cut can be put together again, and the shards of a rank are where its pieces say."""

import pytest
import torch

from optimum_trn.errors import PlanError
from optimum_trn.parallel import Piece, Placement

FULL = torch.arange(12 * 5).reshape(12, 5)

FUSED = Placement((12, 5), 2, 0, ((Piece(0, 3), Piece(6, 3)), (Piece(3, 3), Piece(9, 3))))
KV_REPLICAS = Placement((12, 5), 4, 0, ((Piece(0, 6),), (Piece(0, 6),), (Piece(6, 6),), (Piece(6, 6),)))
PADDED = Placement((12, 5), 5, 0, (*((Piece(3 * rank, 3),) for rank in range(4)), (Piece(None, 3),)))
PADDED_INSIDE = Placement((12, 5), 2, 1, ((Piece(0, 3),), (Piece(3, 2), Piece(None, 1))))


@pytest.mark.parametrize(
    "placement",
    [
        Placement.replicate((12, 5), 3),
        Placement.split((12, 5), 4, 0),
        Placement.split((12, 5), 5, 1),
        Placement.split((12, 5), 5, 0),
        Placement.split((12, 5), 2, 0, (7, 5)),
        FUSED,
        KV_REPLICAS,
        PADDED,
        PADDED_INSIDE,
    ],
)
def test_the_shards_of_all_ranks_make_the_whole_again(placement):
    shards = [placement.shard(FULL, rank) for rank in range(placement.num_ranks)]
    assert torch.equal(placement.unshard(shards), FULL)
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == placement.local_shape(rank)
        assert shard.untyped_storage().nbytes() == shard.nbytes, "a shard must not keep the whole alive"
        assert sum(piece.length for piece in placement.pieces(rank)) == shard.shape[placement.dim or 0]


def test_shards_are_the_pieces_in_their_order():
    assert torch.equal(FUSED.shard(FULL, 1), torch.cat([FULL[3:6], FULL[9:12]]))
    assert torch.equal(PADDED.shard(FULL, 4), torch.zeros(3, 5, dtype=torch.long))
    assert torch.equal(PADDED_INSIDE.shard(FULL, 1), torch.cat([FULL[:, 3:], torch.zeros(12, 1, dtype=torch.long)], 1))


def test_replicas_are_the_ranks_with_the_same_pieces():
    assert [KV_REPLICAS.segments(rank) for rank in (0, 3)] == [((0, 6, (0, 1)),), ((0, 6, (2, 3)),)]
    assert PADDED.segments(4) == ((0, 3, ()),)
    assert FUSED.segments(1) == ((0, 3, (1,)), (3, 3, (1,)))


def test_padding_never_reaches_the_whole():
    shards = [PADDED.shard(FULL, rank) for rank in range(4)] + [torch.full((3, 5), 99)]
    assert torch.equal(PADDED.unshard(shards), FULL)


def test_shapes_are_known_without_a_tensor():
    meta = torch.empty(12, 5, device="meta")
    assert KV_REPLICAS.shard(meta, 3).shape == (6, 5)
    assert Placement.replicate((), 2).pieces(0) == ()


def test_what_cannot_be_cut_is_refused_with_its_numbers():
    with pytest.raises(PlanError, match=r"blocks of \[6, 5\] do not make a dimension of 12"):
        Placement.split((12, 5), 2, 0, (6, 5))
    with pytest.raises(PlanError, match=r"must be equal on all ranks, not of lengths \[5, 7\]"):
        Placement((12, 5), 2, 0, ((Piece(0, 5),), (Piece(5, 7),)))
    with pytest.raises(PlanError, match="1 ranges were given for 2 ranks"):
        Placement((12, 5), 2, 0, ((Piece(0, 6),),))
    with pytest.raises(PlanError, match=r"shape \(12, 4\) was given for one of shape \(12, 5\)"):
        FUSED.shard(FULL[:, :4], 0)
    with pytest.raises(PlanError, match="1 local tensors were given for a placement on 2 ranks"):
        FUSED.unshard([FULL])
