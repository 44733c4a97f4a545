"""Files in a pool: spread over stores, read in ranges, and still there when a store is not."""

import asyncio
import json
import os
import random

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from optimum_trn.errors import MissingError, StoreError
from optimum_trn.pool import Pool, PoolAddress, put_directory
from optimum_trn.pool.fetch import Wanted, read
from optimum_trn.pool.filesystem import PoolFileSystem
from optimum_trn.pool.manifest import FileManifest
from optimum_trn.pool.placement import STRATEGIES, cut, layer_runs

from .pools import a_pool


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"h.{i}.w": torch.randn(300, 300, generator=generator) for i in range(6)}
    tensors |= {f"h.{i}.b": torch.randn(300, generator=generator) for i in range(6)}
    save_file({**tensors, "wte.weight": torch.randn(1000, 30, generator=generator)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def pool():
    with a_pool() as pool:
        yield pool


def whole(pool, name):
    manifest = pool.manifest(name)
    buffer = bytearray(manifest.size)
    read(pool, [Wanted(manifest, 0, memoryview(buffer))])
    return bytes(buffer)


def vanish(server):
    """What kill -9 of a store looks like to its clients."""
    loop = server._server.get_loop()

    async def end():
        server._server.close()
        for writer in list(server._connections):
            writer.transport.abort()

    asyncio.run_coroutine_threadsafe(end(), loop).result(60)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stores", [1, 3, 4])
def test_pieces_cover_a_file_once_in_order_and_use_the_stores_that_the_strategy_says(strategy, stores):
    random_ = random.Random(stores)
    sizes = [random_.choice([0, 10, 70_000, 1_000_003]) for _ in range(30)]
    runs, position = [], 0
    for size in sizes:
        if size:
            runs.append((position, size))
        position += size
    pieces = cut(runs, stores, strategy, first=2)
    assert [piece.offset for piece in pieces] == [sum(p.length for p in pieces[:i]) for i in range(len(pieces))]
    assert sum(piece.length for piece in pieces) == position and min(piece.length for piece in pieces) > 0
    load = [sum(piece.length for piece in pieces if piece.store == store) for store in range(stores)]
    if strategy == "application":
        assert max(load) == position
    elif strategy in ("vertical", "hybrid"):
        assert max(load) < position / stores * 1.1
    if strategy == "hybrid":  # every large layer comes over all links alike
        for offset, length in runs:
            if length > 1_000_000:
                inside = [piece for piece in pieces if offset <= piece.offset < offset + length]
                assert {piece.store for piece in inside} == set(range(stores))
                assert max(piece.length for piece in inside) <= length / stores + 1024


def test_layers_of_a_safetensors_file_are_runs(directory):
    data = (directory / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    runs = layer_runs(data[:end], len(data))
    assert len(runs) == 8 and sum(length for _, length in runs) == len(data)  # the header, six layers, the embedding
    with pytest.raises(StoreError, match="damaged"):
        layer_runs(data[:end], len(data) - 1)
    header = json.loads(data[8:end])
    header["wte.weight"]["data_offsets"] = "x"
    with pytest.raises(StoreError, match="no safetensors"):
        layer_runs(data[:8] + json.dumps(header).encode(), len(data))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_put_is_read_whole_and_in_ranges(pool, directory, strategy):
    put_directory(pool, directory, "m", strategy)
    data = (directory / "model.safetensors").read_bytes()
    assert pool.files() == ["m/config.json", "m/model.safetensors"]
    assert whole(pool, "m/model.safetensors") == data
    manifest = pool.manifest("m/model.safetensors")
    random_ = random.Random(0)
    bounds = [sorted(random_.sample(range(len(data)), 2)) for _ in range(20)]
    buffers = [bytearray(last - first) for first, last in bounds]
    read(pool, [Wanted(manifest, first, memoryview(b)) for (first, _), b in zip(bounds, buffers, strict=True)])
    assert buffers == [data[first:last] for first, last in bounds]
    with pytest.raises(StoreError, match="refused"):
        read(pool, [Wanted(manifest, len(data) - 1, memoryview(bytearray(2)))])


def test_a_file_that_is_put_again_replaces_the_old_one_and_removal_leaves_nothing(pool, directory):
    put_directory(pool, directory, "m")
    torch.manual_seed(1)
    save_file({"h.0.w": torch.randn(500, 500)}, directory / "model.safetensors")
    put_directory(pool, directory, "m")
    assert whole(pool, "m/model.safetensors") == (directory / "model.safetensors").read_bytes()
    for name in pool.files():
        pool.remove(name)
    assert [said["objects"] + said["used"] for said in pool.statistics()] == [0] * 4
    with pytest.raises(MissingError, match="no m/config.json"):
        pool.manifest("m/config.json")


def test_with_replicas_a_lost_store_is_made_up_for_by_another(pool, directory):
    put_directory(pool, directory, "m", replicas=2)
    for path in directory.iterdir():
        path.write_bytes(b"")  # so that the origin cannot help
    data = whole(pool, "m/model.safetensors")
    vanish(pool.servers[1])
    assert whole(pool, "m/model.safetensors") == data
    assert set(pool.lost) == {1}
    assert pool.files() == ["m/config.json", "m/model.safetensors"]


def test_a_lost_store_or_forgotten_piece_without_replicas_is_read_from_the_origin(directory):
    with a_pool(memory=150_000) as pool:  # 2.3 MB do not fit four of these
        put_directory(pool, directory, "m", "hybrid")
        data = (directory / "model.safetensors").read_bytes()
        assert sum(server.shelf.evictions for server in pool.servers) > 0
        assert whole(pool, "m/model.safetensors") == data
        vanish(pool.servers[0])
        assert whole(pool, "m/model.safetensors") == data
        (directory / "model.safetensors").write_bytes(bytes(len(data)))
        with pytest.raises(StoreError, match="has changed since"):
            whole(pool, "m/model.safetensors")
        os.remove(directory / "model.safetensors")
        with pytest.raises(StoreError, match="origin cannot be read"):
            whole(pool, "m/model.safetensors")


@pytest.mark.parametrize("pieces", ['[[0,5,"a",[0]]]', '[[0,6,"a",[0]],[5,5,"b",[0]]]', "[1]", "7"])
def test_a_record_of_pieces_that_are_not_the_file_is_damaged(pieces):
    with pytest.raises(StoreError, match="damaged"):
        FileManifest.decode("m", b'{"size":10,"origin":null,"strategy":"hybrid","pieces":' + pieces.encode() + b"}")


def test_a_lost_store_without_replica_or_origin_is_said(pool, directory):
    pool.put(directory / "model.safetensors", "m")
    vanish(pool.servers[2])
    with pytest.raises(StoreError, match="no other copy.*replicas=2"):
        whole(pool, "m")


def test_damaged_memory_of_a_store_is_found_and_made_up_for(pool, directory):
    put_directory(pool, directory, "m", replicas=2)
    shelf = pool.servers[3].shelf
    for checksum, data in shelf._memory.items():
        shelf._memory[checksum] = bytes([data[0] ^ 1]) + data[1:]
    assert whole(pool, "m/model.safetensors") == (directory / "model.safetensors").read_bytes()


def test_the_address_file_is_for_its_owner_and_errors_say_what_to_do(tmp_path):
    address = PoolAddress((("127.0.0.1", 1),), b"x" * 32, None)
    address.save(tmp_path / "pool.json")
    assert (tmp_path / "pool.json").stat().st_mode & 0o77 == 0
    assert PoolAddress.load(tmp_path / "pool.json") == address
    with pytest.raises(StoreError, match="pool serve"):
        PoolAddress.load(tmp_path / "other.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(StoreError, match="not the file of a pool"):
        PoolAddress.load(tmp_path / "other.json")
    with pytest.raises(StoreError, match="pool serve"):
        Pool(address, timeout=5).files()


def test_the_pool_is_a_file_system(pool, directory, tmp_path):
    fs = PoolFileSystem(pool)
    fs.put_file(str(directory / "model.safetensors"), "pool://run/checkpoint-1/model.safetensors")
    with fs.open("pool://run/note.txt", "wb") as stream:
        stream.write(b"hello ")
        stream.write(b"pool")
    with fs.open("run/note.txt", "rb") as stream:
        assert stream.read(5) == b"hello" and stream.read() == b" pool"
    assert fs.ls("pool://run", detail=False) == ["run/checkpoint-1", "run/note.txt"]
    assert fs.isdir("run/checkpoint-1") and not fs.isdir("run/note.txt") and fs.exists("run/note.txt")
    assert not fs.exists("run/nothing") and fs.find("run") == ["run/checkpoint-1/model.safetensors", "run/note.txt"]
    fs.get_file("run/checkpoint-1/model.safetensors", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == (directory / "model.safetensors").read_bytes()
    fs.rm("run", recursive=True)
    assert pool.files() == []
    with pytest.raises(FileNotFoundError):
        fs.cat_file("run/note.txt")
    with pytest.raises(StoreError, match="'..'"):
        fs.put_file(str(directory / "config.json"), "pool://run/../other")


def test_fsspec_finds_the_pool_by_its_protocol():
    import optimum_trn.checkpoint.remote  # noqa: F401

    assert fsspec.get_filesystem_class("pool") is PoolFileSystem
