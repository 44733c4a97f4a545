"""Stores of chunks: bytes come back as they were put, and damage is found."""

import os

import pytest
import torch

from optimum_trn.errors import CheckpointError
from optimum_trn.store import Chunk, DirectoryStore, Extent, MemoryStore


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_columns_of_a_matrix_that_two_processes_put_make_the_file(tmp_path):
    matrix = random_bytes(6, 10)
    for columns in (slice(0, 4), slice(4, 10)):  # one store for each process
        store = DirectoryStore(tmp_path)
        part = matrix[:, columns]
        extent = Extent(8 + columns.start, part.shape[1], 10, 6)
        store.put("file", extent, part)
        store.close()
        (chunk,) = store.list()
        assert torch.equal(store.get(chunk), part)
        assert Chunk.from_json("file", chunk.as_json()) == chunk
    assert (tmp_path / "file").read_bytes()[8:] == matrix.numpy().tobytes()


def test_damage_is_found_and_said(tmp_path):
    store = DirectoryStore(tmp_path)
    store.put("file", Extent(0, 100, 100, 1), random_bytes(1, 100))
    store.close()
    (chunk,) = store.list()
    content = bytearray((tmp_path / "file").read_bytes())
    content[50] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged between bytes 0 and 100"):
        store.get(chunk)
    os.truncate(tmp_path / "file", 60)
    with pytest.raises(CheckpointError, match="ends before byte 100"):
        store.get(chunk)
    os.remove(tmp_path / "file")
    with pytest.raises(CheckpointError, match="is missing"):
        store.get(chunk)


def test_memory_holds_a_copy_that_moves_to_a_directory_and_is_used_again(tmp_path):
    memory, data = MemoryStore(), random_bytes(3, 8)
    memory.put("file", Extent(0, 8, 16, 3), data)
    kept = memory.get(memory.list()[0])
    expected, address = data.clone(), kept.data_ptr()
    data.zero_()
    assert torch.equal(kept, expected)
    directory = DirectoryStore(tmp_path)
    memory.move_to(directory)
    directory.close()
    assert directory.list() == memory.list()
    assert torch.equal(directory.get(memory.list()[0]), expected)
    old = memory.list()[0]
    memory.clear()
    assert memory.list() == []
    with pytest.raises(CheckpointError, match="No such chunk"):
        memory.get(old)
    memory.put("file", Extent(0, 8, 16, 3), data)
    assert memory.get(memory.list()[0]).data_ptr() == address
