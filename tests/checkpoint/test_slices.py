"""A local slice reads what its rank holds, and nothing else."""

import pytest
import torch
from safetensors.torch import save_file

from optimum_trn.checkpoint.slices import LocalSlice, open_slices, same_values
from optimum_trn.errors import CheckpointError
from optimum_trn.parallel import Piece, Placement

CPU = torch.device("cpu")


class RecordedSource:
    """A tensor that remembers how it was indexed."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tensor.shape
        self.read = 0

    def __getitem__(self, index):
        result = self.tensor[index]
        self.read += result.numel()
        return result


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_ranks_own_entries_are_read_and_only_when_asked_for(dim):
    full = torch.arange(24.0).reshape(4, 6)
    placement = Placement.split(full.shape, 2, dim)
    for rank in range(2):
        source = RecordedSource(full)
        local = LocalSlice(source, placement, rank, CPU, None)
        assert source.read == 0
        assert torch.equal(local[...], placement.shard(full, rank))
        assert source.read == full.numel() // 2


def test_padding_is_zero_and_pieces_come_in_the_order_of_the_placement():
    full = torch.arange(5.0)
    placement = Placement((5,), 2, 0, ((Piece(3, 2), Piece(0, 1)), (Piece(1, 2), Piece(None, 1))))
    assert LocalSlice(full, placement, 0, CPU, None)[...].tolist() == [3, 4, 0]
    assert LocalSlice(full, placement, 1, CPU, None)[...].tolist() == [1, 2, 0]


def test_a_slice_owns_its_storage_so_that_the_file_can_be_replaced(tmp_path):
    save_file({"w": torch.arange(8.0).reshape(4, 2), "scalar": torch.tensor(3.0)}, tmp_path / "a.safetensors")
    sources = open_slices([str(tmp_path / "a.safetensors")])
    local = LocalSlice(sources["w"], Placement.split((4, 2), 2, 0), 1, CPU, torch.float64)[...]
    assert local.untyped_storage().nbytes() == local.numel() * 8
    assert local.tolist() == [[4, 5], [6, 7]]
    scalar = LocalSlice(sources["scalar"], Placement.replicate((), 2), 1, CPU, None)[...]
    assert scalar.shape == () and scalar.item() == 3


def test_a_file_that_was_cut_short_is_named_with_both_sizes(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=rf"a\.safetensors.* has {size - 10} bytes .* announces {size}"):
        open_slices([str(path)])
    path.write_bytes(b"\x01\x02")
    with pytest.raises(CheckpointError, match="2 bytes do not begin with a whole safetensors header"):
        open_slices([str(path)])


def test_comparing_two_tensors_needs_only_some_rows_at_a_time():
    one, other = torch.zeros(5, 2), torch.zeros(5, 2)
    assert same_values(one, other, rows=2)
    other[4, 1] = 1
    assert not same_values(one, other, rows=2)
    assert not same_values(one, torch.zeros(5, 3), rows=2)
