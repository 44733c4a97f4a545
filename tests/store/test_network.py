"""A store over the network: objects come back as they were put, to those who know the token and to nobody else."""

import os
import random
import socket
import struct

import pytest

from optimum_trn.errors import MissingError, StoreError
from optimum_trn.store import Shelf, StoreClient, StoreServer
from optimum_trn.store.protocol import (
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    Operation,
    check_name,
    checksum_of_bytes,
    encode,
)

from .servers import TOKEN, a_store, running

DATA = random.Random(0).randbytes(9 << 20)  # of three chunks


@pytest.fixture
def server():
    with running(a_store()) as server:
        yield server


@pytest.fixture
def client(server):
    with StoreClient(server.host, server.port, TOKEN) as client:
        yield client


def test_objects_come_back_whole_and_in_ranges_until_they_are_deleted(client, server):
    client.put("model/a", DATA)
    client.put("model/empty", b"")
    assert client.get("model/a") == DATA
    assert client.get("model/a", 3_000_000, 5_000_000) == DATA[3_000_000:8_000_000]
    assert client.get("model/empty") == b""
    buffers, counts = [bytearray(10), bytearray(20)], []
    ranges = [("model/a", 4194300, 10), ("model/a", 0, 20)]
    client.read_into(ranges, [memoryview(b) for b in buffers], counts.append)
    assert buffers == [DATA[4194300:4194310], DATA[:20]] and sum(counts) == 30
    assert client.list("model/") == {"model/a": len(DATA), "model/empty": 0}
    client.delete("model/a")
    assert client.list() == {"model/empty": 0}
    assert client.statistics()["used"] == 0
    with pytest.raises(MissingError, match="no model/a"):
        client.get("model/a")


def test_equal_chunks_are_kept_and_sent_once(client, server):
    client.put("a", DATA)
    used = client.statistics()["used"]
    client.put("b", DATA)
    assert client.statistics()["used"] == used
    client.delete("a")
    assert client.get("b") == DATA


def test_what_a_lost_client_was_putting_is_dropped(server):
    client = StoreClient(server.host, server.port, TOKEN)
    client.ask(Operation.CHUNK, {"checksum": checksum_of_bytes(b"half")}, memoryview(b"half"))
    assert client.statistics()["used"] == 4
    client.close()
    with StoreClient(server.host, server.port, TOKEN) as other:
        while other.statistics()["used"]:
            pass
        assert other.list() == {}


def test_a_read_larger_than_a_frame_is_several_requests(client, server, monkeypatch):
    monkeypatch.setattr("optimum_trn.store.client.MAX_PAYLOAD", 1 << 20)
    client.put("a", DATA)
    assert client.get("a") == DATA


def test_more_objects_than_one_answer_lists(client, server, monkeypatch):
    monkeypatch.setattr("optimum_trn.store.server.LISTED", 2)
    for index in range(5):
        client.put(f"m/{index}", b"x")
    assert list(client.list("m/")) == [f"m/{index}" for index in range(5)]


def test_the_least_recently_used_is_forgotten_unless_it_is_pinned():
    server = a_store(memory=250)
    with running(server), StoreClient(server.host, server.port, TOKEN) as client:
        client.put("pinned", b"p" * 100)
        client.put("old", b"o" * 100, pinned=False)
        client.put("new", b"n" * 100, pinned=False)
        with pytest.raises(MissingError, match="used more recently"):
            client.get("old")
        assert client.get("new") == b"n" * 100
        assert client.get("pinned") == b"p" * 100
        with pytest.raises(StoreError, match="full: 200 of its 250"):
            client.put("more", b"m" * 100)
            client.put("more still", b"M" * 100)
        assert client.get("pinned") == b"p" * 100


def test_with_a_directory_the_least_recently_used_goes_to_disk_and_comes_back(tmp_path):
    shelf = Shelf(250, tmp_path)
    with running(StoreServer(shelf, TOKEN)) as server, StoreClient(server.host, server.port, TOKEN) as client:
        objects = {f"o{index}": bytes([index]) * 100 for index in range(6)}
        for name, data in objects.items():
            client.put(name, data)
        assert shelf.used == 200 and len(list(tmp_path.iterdir())) == 4
        for name, data in objects.items():
            assert client.get(name) == data
        (damaged,) = [file for file in tmp_path.iterdir() if file.name == checksum_of_bytes(objects["o0"])]
        damaged.write_bytes(b"\xff" * 100)
        with pytest.raises(MissingError, match="damaged on the disk"):
            client.get("o0")
        for name in objects:
            client.delete(name)
        assert not list(tmp_path.iterdir()) and shelf.used == 0


def test_without_the_token_nothing_is_listed_read_or_written(client, server):
    client.put("secret", b"secret")
    for action in (
        lambda other: other.list(),
        lambda other: other.get("secret"),
        lambda other: other.put("mine", b"x"),
        lambda other: other.delete("secret"),
        lambda other: other.statistics(),
    ):
        with StoreClient(server.host, server.port, b"another token of tests") as other:
            with pytest.raises(StoreError, match="another token"):
                action(other)
    with socket.create_connection((server.host, server.port)) as raw:  # asks at once, without answering the challenge
        raw.sendall(encode(Operation.LIST, {"prefix": "", "after": ""}) + bytes(64))
        received = b""
        while part := raw.recv(1000):
            received += part
        assert len(received) == 32  # the challenge, and no more
    assert client.list() == {"secret": 6}


def test_a_client_gives_nothing_to_a_stranger_on_the_port_of_a_store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = StoreClient(*listener.getsockname(), TOKEN)
        import threading

        def stranger():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(os.urandom(32))
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(os.urandom(32))

        thread = threading.Thread(target=stranger)
        thread.start()
        with pytest.raises(StoreError, match="does not know the token"):
            client.put("a", b"x")
        thread.join(60)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", "a\\b", "a\0b", "a\nb", "x" * 600]
)
def test_names_that_could_lead_out_of_a_directory_are_refused(client, name):
    with pytest.raises(StoreError, match="name"):
        client.ask(Operation.COMMIT, {"name": name, "chunks": [], "pinned": True})
    with pytest.raises(StoreError, match="name"):
        client.ask(Operation.READ, {"ranges": [[name, 0, 1]]})
    with pytest.raises(StoreError):
        check_name(name)


@pytest.mark.parametrize("offset, length", [(0, 11), (11, 0), (10, 1), (-1, 2), (0, 1 << 62), (0.5, 1), (True, 1)])
def test_ranges_beyond_the_object_are_refused(client, offset, length):
    client.put("a", b"0123456789")
    with pytest.raises(StoreError):
        client.ask(Operation.READ, {"ranges": [["a", offset, length]]})
    assert client.get("a") == b"0123456789"


def test_frames_larger_than_the_bounds_are_refused_before_they_are_read(client, server):
    for meta, payload in ((1 << 31, 0), (0, MAX_PAYLOAD + 1), (0, (1 << 64) - 1)):
        client.statistics()
        client._socket.sendall(struct.pack("!4sB3xIQ8s", MAGIC, Operation.CHUNK, meta, payload, bytes(8)))
        assert client._socket.recv(1) == b""  # the connection is ended
        client.close()


def test_a_chunk_with_another_checksum_is_refused(client, server):
    with pytest.raises(StoreError, match="another checksum"):
        client.ask(Operation.CHUNK, {"checksum": checksum_of_bytes(b"a")}, memoryview(b"b"))
    with pytest.raises(MissingError, match="was not put"):
        client.ask(Operation.COMMIT, {"name": "a", "chunks": [[checksum_of_bytes(b"a"), 1]], "pinned": True})


def test_a_short_token_is_refused():
    with pytest.raises(StoreError, match="can be guessed"):
        StoreServer(Shelf(1), b"short")


def fuzzed(random_: random.Random) -> bytes:
    """A frame with something wrong: bytes, lengths, JSON, types, order."""
    values = [
        None,
        True,
        -1,
        0,
        1 << 70,
        0.5,
        "a",
        "a/../b",
        "",
        "\ud800",
        [],
        [[]],
        {},
        [["a", 0, 1]],
        [["a", 1 << 63, -1]],
    ]
    keys = ["name", "chunks", "pinned", "ranges", "prefix", "after", "checksum", "x"]
    meta = {random_.choice(keys): random_.choice(values) for _ in range(random_.randrange(5))}
    payload = random_.randbytes(random_.choice([0, 0, 1, 50]))
    operation = random_.choice(list(Operation))
    frame = bytearray(encode(operation, meta, [memoryview(payload)]) + payload)
    kind = random_.randrange(6)
    if kind == 0:
        for _ in range(random_.randrange(1, 8)):
            frame[random_.randrange(len(frame))] = random_.randrange(256)
    elif kind == 1:
        frame = frame[: random_.randrange(len(frame))]
    elif kind == 2:
        frame = bytearray(random_.randbytes(random_.randrange(100)))
    elif kind == 3:
        text = random_.choice(
            [b"[" * 5000, b"1", b"{", b'{"a":' * 3000, b"\xff", b'{"ranges":[["a",0,1e999]]}', b"9" * 5000]
        )
        frame = bytearray(HEADER.pack(MAGIC, operation, len(text), 0, bytes(8)) + text)
    return bytes(frame)


@pytest.mark.parametrize("cases", [2_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_fuzzed_frames_of_one_who_knows_the_token_crash_nothing(server, cases, caplog):
    random_ = random.Random(cases)
    with StoreClient(server.host, server.port, TOKEN) as good:
        good.put("a", b"0123456789")
        done = 0
        while done < cases:
            with StoreClient(server.host, server.port, TOKEN) as client:
                connection = client._connected()
                frames = [fuzzed(random_) for _ in range(20)]
                done += len(frames)
                try:
                    for frame in frames:
                        connection.sendall(frame)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                except OSError:
                    pass  # the store has ended the connection
        assert good.list().get("a", 10) == 10
        good.put("b", DATA)
        assert good.get("b") == DATA
    assert not [record for record in caplog.records if record.name == "asyncio"]  # no exception was left to the loop
