"""Every rank writes what it holds, in whatever runs and shards: together it is the whole file, each byte once."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from optimum_trn.checkpoint import shared_files
from optimum_trn.checkpoint.pieces import Held, boxes_of_run, pieces
from optimum_trn.checkpoint.shared_files import SharedFiles, chunks
from optimum_trn.parallel import Placement
from optimum_trn.store import DirectoryStore, MemoryStore

SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_a_run_are_the_run_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            boxes = list(boxes_of_run(shape, start, stop))
            found = [whole[tuple(slice(*ends) for ends in box)].reshape(-1) for box in boxes]
            assert torch.cat(found or [whole.new_empty(0)]).tolist() == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


PLACEMENTS = {
    "whole": Placement.replicate((6, 8), 2),
    "rows": Placement.split((6, 8), 2, 0),
    "columns": Placement.split((6, 8), 2, 1),
    "padded columns": Placement.split((6, 7), 2, 1),
    "padded rows": Placement.split((5, 8), 2, 0),
    "experts": Placement.split((4, 3, 5), 2, 0),
    "the middle": Placement.split((4, 6, 5), 2, 1),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("data_parallel", [1, 3])
@pytest.mark.parametrize("store_of", ["directory", "memory"])
def test_the_runs_of_all_ranks_make_the_whole_file_and_cover_each_byte_once(
    tmp_path, monkeypatch, name, data_parallel, store_of
):
    monkeypatch.setattr(shared_files, "CHUNK_BYTES", 24)  # so that tensors take several chunks
    placement = PLACEMENTS[name]
    whole = torch.randn(placement.global_shape)
    other = torch.randn(3).to(torch.bfloat16)
    covered = Counter()
    for tensor_rank in range(2):
        local = placement.shard(whole, tensor_rank).reshape(-1)
        cuts = [len(local) * n // data_parallel for n in range(data_parallel + 1)]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            files = SharedFiles()
            found = pieces(local[start:stop].clone(), start, placement, tensor_rank)
            boxes = [(box, values) for box, values, first in found if first]
            is_first = tensor_rank == 0 and start == 0
            tensors = {
                "weight": Held(whole.shape, whole.dtype, boxes, files.write),
                "other": Held((3,), torch.bfloat16, [(((0, 3),), other)] if is_first else [], files.write),
            }
            files.add("file.safetensors", tensors, {"format": "pt"}, header=is_first)
            store = DirectoryStore(tmp_path)
            if store_of == "memory":
                memory = MemoryStore()
                files.put_into(memory)
                memory.move_to(store)
            else:
                files.put_into(store)
            store.close()
            for chunk in store.list():
                for offset in chunk.extent.offsets:
                    covered.update(range(offset, offset + chunk.extent.run))
    loaded = load_file(tmp_path / "file.safetensors")
    assert torch.equal(loaded["weight"], whole) and torch.equal(loaded["other"], other)
    assert covered == Counter(range((tmp_path / "file.safetensors").stat().st_size))


def test_a_transposed_part_lands_where_it_belongs():
    whole = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)
    target = torch.empty(3, 4, 5, dtype=torch.int32, device="meta").transpose(0, 2)[1:4, :, 1:]
    values = whole.transpose(0, 2)[1:4, :, 1:]
    storage = torch.full((60,), -1, dtype=torch.int32)
    for extent, part in chunks(target, values.contiguous()):
        for offset, run in zip(extent.offsets, part, strict=True):
            storage[offset // 4 : (offset + extent.run) // 4] = run
    expected = torch.full((3, 4, 5), -1, dtype=torch.int32)
    expected.transpose(0, 2)[1:4, :, 1:] = values
    assert torch.equal(storage.view(3, 4, 5), expected)
