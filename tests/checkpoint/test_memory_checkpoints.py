"""Memory checkpoints are whole or not found: full, half-written, damaged and mixed ones never make a torn state."""

import threading

import pytest
import torch

from optimum_trn.checkpoint import packed
from optimum_trn.checkpoint.agents import AGENTS, TOKEN, Agents
from optimum_trn.checkpoint.memory_resume import LOCAL, PEER, MemoryReader
from optimum_trn.checkpoint.memory_saving import MemorySaving, MemoryWriter, object_name
from optimum_trn.checkpoint.placement import mixed_placement
from optimum_trn.checkpoint.shared_files import Write
from optimum_trn.checkpoint.spans import IdleSpans
from optimum_trn.errors import CheckpointError, PlanError
from optimum_trn.store import DirectoryStore, Shelf, StoreClient, StoreServer
from tests.store.servers import running

SECRET = b"0123456789abcdef" * 2
ELEMENTS = 4096


class Nodes:
    """Agents in this process, and the writers of one rank on each node."""

    def __init__(self, stack, count, memory=1 << 20, replicas=2):
        self.servers = [stack.enter_context(running(StoreServer(Shelf(memory), SECRET))) for _ in range(count)]
        addresses = tuple((server.host, server.port) for server in self.servers)
        self.agents = Agents(addresses, SECRET, mixed_placement(count, replicas), 1)
        self.writers = [MemoryWriter(self.agents, "run", rank, IdleSpans()) for rank in range(count)]

    def save(self, step, ranks=None, attempt="a", settle=True):
        errors = []
        for rank in range(len(self.writers)) if ranks is None else ranks:
            saving = MemorySaving(step)
            saving.directory.mkdir(parents=True)
            (saving.directory / f"small-{rank}").write_text(f"{step} of {rank}")
            data = torch.full((ELEMENTS,), float(step))
            place = torch.empty(len(self.writers) * ELEMENTS, device="meta")[rank * ELEMENTS : (rank + 1) * ELEMENTS]
            saving.files.writes.append(Write("large", 0, place, data))
            self.writers[rank].start(saving, {"attempt": attempt})
            saving.close()
            errors.append(self.writers[rank].finish())
        if settle:
            for writer in self.writers:
                writer.settle(not any(errors))
        return errors

    def find(self):
        reader = MemoryReader(self.agents, "run", 0, len(self.writers))
        found = reader.find()
        reader.close()
        return found

    def check(self, found, step):
        assert found.step == step
        for rank in range(len(self.writers)):
            assert (found.directory / f"small-{rank}").read_text() == f"{step} of {rank}"
        values = torch.frombuffer(bytearray((found.directory / "large").read_bytes()), dtype=torch.float32)
        assert torch.equal(values, torch.full((len(self.writers) * ELEMENTS,), float(step)))
        found.remove()
        assert not found.directory.exists()

    def client(self, node):
        return StoreClient(*self.agents.addresses[node], SECRET)


@pytest.fixture
def stack():
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield stack


def test_two_slots_and_the_last_complete_step_is_found(stack):
    nodes = Nodes(stack, 4)
    for step in (1, 2, 3):
        assert not any(nodes.save(step))
        for node in range(4):
            with nodes.client(node) as client:
                assert sorted(client.list()) == [
                    object_name("run", step, rank) for rank in range(4) if node in nodes.agents.holders(rank)
                ]
    found, wrong = nodes.find()
    assert found.tier == LOCAL and found.newest_seen == 3 and not wrong
    nodes.check(found, 3)


def test_a_half_written_step_is_not_found_and_the_one_before_is(stack):
    nodes = Nodes(stack, 2)
    nodes.save(1)
    nodes.save(2, ranks=[0], settle=False)
    with nodes.client(1) as client:  # the other rank died in the middle of sending
        from optimum_trn.store.protocol import Operation, checksum_of_bytes

        client.ask(Operation.CHUNK, {"checksum": checksum_of_bytes(b"part")}, memoryview(b"part"))
    found, _ = nodes.find()
    assert found.newest_seen == 2
    nodes.check(found, 1)


def test_a_damaged_chunk_is_replaced_by_the_peers_copy_and_without_one_by_the_step_before(stack):
    nodes = Nodes(stack, 2)
    nodes.save(1)
    for rank in range(2):
        nodes.writers[rank].complete = None  # keep both steps
    nodes.save(2)

    def damage(node, rank):
        with nodes.client(node) as client:
            content = client.get(object_name("run", 2, rank))
            content[-5] ^= 1
            client.put(object_name("run", 2, rank), content)

    damage(1, 1)
    found, _ = nodes.find()
    assert found.tier == PEER
    nodes.check(found, 2)
    damage(0, 1)
    found, wrong = nodes.find()
    assert "node 1: A memory checkpoint is damaged" in wrong[0] and "node 0" in wrong[0]
    nodes.check(found, 1)


def test_full_memory_leaves_the_last_step_as_it_was(stack):
    nodes = Nodes(stack, 2, memory=5 * 4 * ELEMENTS)  # room for two steps of two ranks, and a little more
    nodes.save(1)
    with nodes.client(1) as client:
        client.put("other", bytes(range(256)) * (4 * ELEMENTS * 2 // 256 - 8))
    assert "full" in str(nodes.save(2)[1])
    found, _ = nodes.find()
    nodes.check(found, 1)
    with nodes.client(1) as client:
        client.delete("other")
    assert not any(nodes.save(3))
    nodes.check(nodes.find()[0], 3)


def test_parts_of_different_starts_are_not_mixed(stack):
    nodes = Nodes(stack, 2)
    nodes.save(4, attempt="a")
    nodes.save(5, ranks=[0], attempt="a", settle=False)
    nodes.save(5, ranks=[1], attempt="b", settle=False)
    found, wrong = nodes.find()
    assert "different starts" in wrong[0]
    nodes.check(found, 4)
    nodes.writers[1].keep_only(4)
    found, wrong = nodes.find()
    assert not wrong
    nodes.check(found, 4)


def test_a_lost_group_is_said_and_a_lost_node_is_not_missed(stack):
    nodes = Nodes(stack, 4)
    nodes.save(1)
    empty = stack.enter_context(running(StoreServer(Shelf(1 << 20), SECRET)))
    addresses = list(nodes.agents.addresses)
    addresses[1] = (empty.host, empty.port)
    nodes.agents = Agents(tuple(addresses), SECRET, nodes.agents.placement, 1)
    found, _ = nodes.find()
    assert found.tier == PEER
    nodes.check(found, 1)
    addresses[0] = (empty.host, empty.port)
    nodes.agents = Agents(tuple(addresses), SECRET, nodes.agents.placement, 1)
    found, wrong = nodes.find()
    assert found is None and wrong == ["The memory that is left holds nothing of rank 0, 1."]


@pytest.mark.parametrize("position", range(0, 700, 7))
def test_any_changed_byte_is_found(position, tmp_path):
    from optimum_trn.store import Extent

    chunks = packed.Packed()
    chunks.put("a", Extent(0, 8, 8, 32), torch.arange(256, dtype=torch.uint8).view(32, 8))
    content = chunks.content({"step": 1})
    packed.check(content)
    packed.unpack(content, DirectoryStore(tmp_path))
    assert (tmp_path / "a").read_bytes() == bytes(range(256))
    content[position % len(content)] ^= 4
    with pytest.raises(CheckpointError, match="damaged|cut short"):
        packed.check(content)


def test_files_that_lead_out_of_the_directory_are_refused():
    from optimum_trn.store import Extent

    chunks = packed.Packed()
    chunks.put("../a", Extent(0, 1, 1, 1), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="refused"):
        packed.files(chunks.content({}))


def test_what_the_launcher_forgot_is_named(monkeypatch):
    monkeypatch.delenv(AGENTS, raising=False)
    with pytest.raises(CheckpointError, match="optimum-trn agent"):
        Agents.of_environment(2, 4)
    monkeypatch.setenv(AGENTS, "a:1,b:2")
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(CheckpointError, match="at least 32 characters"):
        Agents.of_environment(2, 4)
    with pytest.raises(CheckpointError, match="3 ranks are not on 2 nodes"):
        Agents.of_environment(2, 3)
    with pytest.raises(PlanError, match="3 copies"):
        Agents.of_environment(3, 4)
    monkeypatch.setenv(TOKEN, SECRET.decode())
    agents = Agents.of_environment(2, 4)
    assert agents.holders(3) == (1, 0) and agents.addresses == (("a", 1), ("b", 2))


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_idle_spans_are_learnt_and_chunks_wait_for_one_that_has_room():
    clock = Clock()
    spans = IdleSpans(clock)
    assert spans.expected_idle() == float("inf")
    for _ in range(5):  # steps of 10 s: the links are in use from 2 to 3 and from 7 to 9
        begun = clock.seconds
        spans.begin_step()
        for start, end in ((2, 3), (7, 9)):
            clock.seconds = begun + start
            with spans.busy():
                assert spans.expected_idle() == 0.0
                clock.seconds = begun + end
        clock.seconds = begun + 10
    spans.begin_step()
    begun = clock.seconds
    for position, expected in ((0, 2), (1.5, 0.5), (3, 4), (9, 3)):  # the last one reaches into the next step
        clock.seconds = begun + position
        assert spans.expected_idle() == pytest.approx(expected)


def test_a_chunk_is_sent_as_soon_as_the_links_are_idle():
    spans = IdleSpans()
    sent = threading.Event()

    def send():
        with spans.pace(100):
            sent.set()

    with spans.busy():
        thread = threading.Thread(target=send)
        thread.start()
        assert not sent.is_set()
    thread.join(30)
    assert sent.is_set() and spans.bytes_per_second is not None
