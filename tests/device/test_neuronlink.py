"""NeuronLink: collectives in shared memory return what gloo does, the same bits everywhere, and leave nothing."""

import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from optimum_trn.device import neuronlink
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks

SIZES = (1, 3, 17, 1000, 4099, 100_003)  # of whole tensors: odd, below and above a cache line, a block, a share


def backend(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device("neuron"))


def noise(rank, size, dtype):
    generator = torch.Generator().manual_seed(1000 * size + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-50, 50, (size,), generator=generator).to(dtype)


def digest(tensor):
    return zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


# ------------------------------------------------------------------------------------------------- against expectation


def reduce_noise(rank, world_size, dtypes, ranks):
    local_device()
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    assert backend(group).state.linked
    wrong, digests = [], []
    for dtype in dtypes:
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        for size in SIZES:
            everyone = [noise(r, size, dtype) for r in ranks]
            # Rank order, in float32 for bfloat16, rounded once: what one process would compute.
            accumulate = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
            total = everyone[0].to(accumulate)
            for other in everyone[1:]:
                total = total + other.to(accumulate)
            largest = torch.stack([t.to(wide) for t in everyone]).amax(0).to(dtype)
            operations = [("SUM", total.to(dtype)), ("MAX", largest)]
            if dtype.is_floating_point:
                operations.append(("AVG", (total / len(ranks)).to(dtype)))
            for name, want in operations:
                op = getattr(dist.ReduceOp, name)
                tensor = noise(rank, size, dtype).to("neuron")
                dist.all_reduce(tensor, op, group=group)
                digests.append(digest(tensor))
                if not torch.equal(tensor.cpu(), want):
                    wrong.append(f"all_reduce {name} {dtype} {size}")

                mine = noise(rank, size, dtype).to("neuron")
                dist.reduce(mine, ranks[-1], op, group=group)
                if not torch.equal(mine.cpu(), want if rank == ranks[-1] else noise(rank, size, dtype)):
                    wrong.append(f"reduce {name} {dtype} {size}")

            parts = [noise(rank, size, dtype).to("neuron") for _ in ranks]
            part = torch.empty(size, dtype=dtype, device="neuron")
            dist.reduce_scatter(part, parts, group=group)
            whole = torch.cat(parts)
            again = torch.empty_like(part)
            dist.reduce_scatter_tensor(again, whole, group=group)
            if not torch.equal(part.cpu(), total.to(dtype)) or not torch.equal(again.cpu(), total.to(dtype)):
                wrong.append(f"reduce_scatter {dtype} {size}")
    return wrong, digests


REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8)


@pytest.mark.parametrize("ranks", [[0, 1], [0, 2], [0, 1, 2]], ids=str)
def test_reductions_are_exactly_those_of_one_process_and_the_same_bits_on_all_ranks(ranks):
    dtypes = REDUCED if ranks == [0, 1] else REDUCED[:2]
    results = [r for r in run_ranks(reduce_noise, 3, dtypes, ranks, environment=FLOAT64) if r is not None]
    assert len(results) == len(ranks)
    for wrong, digests in results:
        assert wrong == [] and digests == results[0][1]


def test_a_sum_in_bfloat16_is_rounded_once():
    # 256 + 1 + 1 in bfloat16 steps stays 256; in float32 it is 258.
    assert run_ranks(sum_in_bfloat16, 3) == [258.0] * 3


def sum_in_bfloat16(rank, world_size):
    tensor = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16, device="neuron")
    dist.all_reduce(tensor)
    return tensor.item()


def against_gloo(rank, world_size):
    """Everything that moves data, of odd sizes, on NeuronLink and on gloo by the CPU tensors of the same group."""
    device = torch.device("neuron")
    wrong = []

    def both(name, call):
        linked, carried = call(device), call(torch.device("cpu"))
        if not all(torch.equal(a.cpu(), b) for a, b in zip(linked, carried, strict=True)):
            wrong.append(name)

    for size in SIZES:

        def gathered(on, size=size):
            into = torch.empty(world_size * size, device=on)
            dist.all_gather_into_tensor(into, noise(rank, size, torch.float32).to(on))
            uneven = [torch.empty(size + r, device=on) for r in range(world_size)]
            dist.all_gather(uneven, noise(rank, size + rank, torch.float32).to(on))
            to_one = [torch.empty(size, device=on) for _ in range(world_size)] if rank == 1 else None
            dist.gather(noise(rank, size, torch.float32).to(on), to_one, dst=1)
            return [into, *uneven, *(to_one or [])]

        def spread(on, size=size):
            sent = noise(rank, size, torch.float32).to(on)
            dist.broadcast(sent, src=world_size - 1)
            part = torch.empty(size, device=on)
            parts = [noise(10 + r, size, torch.float32).to(on) for r in range(world_size)]
            dist.scatter(part, parts if rank == 0 else None, src=0)
            return [sent, part]

        def exchanged(on, size=size):
            outputs = [torch.empty(size + r * rank, device=on) for r in range(world_size)]
            dist.all_to_all(outputs, [noise(rank, size + r * rank, torch.float32).to(on) for r in range(world_size)])
            rows = [size + r for r in range(world_size)]
            single = torch.empty(world_size * (size + rank), 2, device=on)
            source = noise(rank, 2 * sum(rows), torch.float32).view(-1, 2).to(on)
            dist.all_to_all_single(single, source, [size + rank] * world_size, rows)
            return [*outputs, single]

        def strided(on, size=size):
            # Dense, but not contiguous; whole numbers, for gloo adds in another order.
            columns = noise(rank, 6 * size, torch.float32).round().to(on).view(size, 6).t()
            dist.all_reduce(columns)
            return [columns]

        for call in (gathered, spread, exchanged, strided):
            both(f"{call.__name__} {size}", call)
    return wrong


def test_what_moves_arrives_as_over_gloo():
    assert run_ranks(against_gloo, 3) == [[]] * 3


def transfers(rank, world_size):
    """Tags out of order, more messages than fit, both directions at once, and from anybody."""
    peer = 1 - rank
    wrong = 0
    for _ in range(20):  # a message that arrives while receives are looked through must not overtake
        received = [torch.empty(5, device="neuron") for _ in range(100)]
        sent = [torch.full((5,), 100.0 * rank + i, device="neuron") for i in range(100)]
        requests = [dist.isend(sent[i], peer, tag=i % 3) for i in range(100)]
        for tag in (2, 0, 1):
            requests += [dist.irecv(received[i], peer, tag=tag) for i in range(100) if i % 3 == tag]
        for request in requests:
            request.wait()
        wrong += [t[4].item() for t in received] != [100.0 * peer + i for i in range(100)]
    anyone = torch.empty(1, device="neuron")
    source = dist.recv(anyone) if rank == 0 else dist.send(torch.ones(1, device="neuron"), 0)
    return wrong, source


def test_transfers_match_by_tag_in_order_and_queue_when_there_are_many():
    assert run_ranks(transfers, 2) == [(0, 1), (0, None)]


def in_flight(rank, world_size):
    """Fifty collectives on two groups in opposite orders, waited for backwards, by nobody, or through a future."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    tensors = [torch.full((1000 + i,), float(rank + i), device="neuron") for i in range(50)]
    order = list(range(50)) if rank == 0 else [i + 1 - 2 * (i % 2) for i in range(50)]
    works = {i: dist.all_reduce(tensors[i], group=groups[i % 2], async_op=True) for i in order}
    for i in reversed(range(40)):
        works[i].wait()
    for i in range(40, 45):
        works[i].get_future().wait()
    dist.barrier(groups[0])
    dist.barrier(groups[1])
    return [t[-1].item() for t in tensors]


def test_many_collectives_in_flight_finish_whoever_waits():
    assert run_ranks(in_flight, 2) == [[2.0 * i + 1 for i in range(50)]] * 2


def compute_while_reducing(rank, world_size):
    """Whether a collective that nobody waits for finishes while this thread is busy elsewhere."""
    tensor = torch.ones(100_000, device="neuron")
    work = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 60
    matrix = torch.ones(64, 64, device="neuron")
    while not work.is_completed() and time.monotonic() < deadline:
        matrix = matrix @ matrix * 0
    return work.is_completed(), tensor.sum().item()


def test_a_collective_proceeds_while_the_rank_computes():
    assert run_ranks(compute_while_reducing, 2) == [(True, 200_000.0)] * 2


def elsewhere(rank, world_size):
    """Tensors on another core of the process than the shared one, which the peers cannot reach."""
    other = (rank + 1) % 4
    tensor = torch.full((7,), rank + 1.0, device=f"neuron:{other}")
    dist.all_reduce(tensor)
    pieces = [torch.empty(7, device=f"neuron:{other}") for _ in range(world_size)]
    dist.all_gather(pieces, tensor * (rank + 1))
    return tensor.tolist(), [p[0].item() for p in pieces]


def test_tensors_outside_the_shared_memory_take_part():
    assert run_ranks(elsewhere, 2) == [([3.0] * 7, [3.0, 6.0])] * 2


def crowd(rank, world_size):
    tensor = torch.full((1025,), float(rank), device="neuron")
    for _ in range(200):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    outputs = torch.empty(4 * 1025, device="neuron")
    dist.all_gather_into_tensor(outputs, tensor + rank)
    return tensor[-1].item(), outputs[::1025].tolist()


def test_more_ranks_than_cores_take_turns():
    assert run_ranks(crowd, 4) == [(1.5, [1.5, 2.5, 3.5, 4.5])] * 4


def counted(rank, world_size):
    before = backend().state.traffic
    assert "all_reduce" not in before
    for _ in range(3):
        dist.all_reduce(torch.ones(10, device="neuron"))
    dist.all_gather_into_tensor(torch.empty(8, device="neuron"), torch.ones(4, device="neuron"))
    dist.all_reduce(torch.ones(10))  # on the CPU, by gloo
    return backend().state.traffic


def test_a_group_counts_its_calls_and_bytes_by_operator():
    for traffic in run_ranks(counted, 2):
        assert traffic["all_reduce"] == (4, 160) and traffic["all_gather_into_tensor"] == (1, 16)


# ---------------------------------------------------------------------------------------------------- who is connected


def mapped_peers():
    """Mappings of HBM in this process: its own, and one for every peer."""
    return sum("memfd:neuron-hbm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def apart(rank, world_size):
    torch.ones(1, device="neuron")
    before = mapped_peers()
    os.environ["GROUP_RANK"] = str(rank)  # what torchrun says on another node
    group = dist.new_group([0, 1])
    tensor = torch.ones(3, device="neuron")
    dist.all_reduce(tensor, group=group)
    return backend(group).state.linked, mapped_peers() - before, tensor.tolist()


def test_ranks_of_different_nodes_never_share_memory():
    assert run_ranks(apart, 2) == [(False, 0, [2.0] * 3)] * 2


def refused(rank, world_size):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    neuronlink.logger.addHandler(handler)
    exchange, neuronlink._warned = neuronlink._exchange, False

    def broken(*arguments):
        if rank == 1:
            raise OSError("no shared memory here")
        return exchange(*arguments)

    neuronlink._exchange, neuronlink.SECONDS = broken, 1.0
    try:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    finally:
        neuronlink._exchange, neuronlink.SECONDS = exchange, 60.0
        neuronlink.logger.removeHandler(handler)
    tensor = torch.ones(3, device="neuron")
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return [backend(group).state.linked for group in groups], said, tensor.tolist()


def test_gloo_takes_over_with_one_warning_where_memory_cannot_be_shared():
    for linked, said, tensor in run_ranks(refused, 2):
        assert linked == [False, False] and tensor == [4.0] * 3
        assert len(said) == 1 and "gloo carries the collectives" in said[0]


# --------------------------------------------------------------------------------------------------------------- death


def die_at(rank, world_size, place):
    dist.barrier()
    if rank == 1:
        if place == "posted":
            dist.all_reduce(torch.ones(100, device="neuron"), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(2):
            if place == "transfer":
                dist.recv(torch.ones(100, device="neuron"), 1)
            else:
                dist.all_reduce(torch.ones(100, device="neuron"))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing raised", 0.0


@pytest.mark.parametrize(
    "place",
    ["waiting", pytest.param("posted", marks=pytest.mark.full), pytest.param("transfer", marks=pytest.mark.full)],
)
def test_the_death_of_a_peer_is_seen_at_once_and_named(place):
    results = run_ranks(die_at, 2, place, may_die=[1])
    text, seconds = results[0]
    assert "rank 1 of the group died" in text
    assert seconds < 20, "the timeout of the group is 120 s"


REDUCES_FOR_EVER = """
import torch, torch.distributed as dist
import optimum_trn
dist.init_process_group("neuron")
tensor = torch.ones(1000, device="neuron")
dist.all_reduce(tensor)
print("ready", flush=True)
while True:
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
"""
FORGETS = """
import torch, torch.distributed as dist
import optimum_trn
dist.init_process_group("neuron")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
tensor = torch.full((1000,), rank + 1.0, device="neuron")
if rank == 0:
    dist.all_reduce(tensor, async_op=True)
    store.set("started", "")
else:
    store.wait(["started"])
    dist.all_reduce(tensor)
    print("sum", tensor.mean().item(), flush=True)
dist.destroy_process_group()
"""


def start_ranks(directory, text):
    """Two processes that run a script, each with its output in a pipe."""
    script = directory / "script.py"
    script.write_text(text)
    temporary = directory / "t"
    temporary.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return processes, store, temporary


def test_nothing_is_left_behind_by_processes_that_are_killed(tmp_path):
    segments = set(os.listdir("/dev/shm"))
    processes, _store, temporary = start_ranks(tmp_path, REDUCES_FOR_EVER)
    try:
        for process in processes:
            assert "ready" in process.stdout.readline()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not list(temporary.glob("neuronlink-*"))
    assert not [name for name in set(os.listdir("/dev/shm")) - segments if "neuron" in name]


def test_a_rank_that_leaves_first_does_its_share_of_what_it_did_not_wait_for(tmp_path):
    processes, _store, _ = start_ranks(tmp_path, FORGETS)
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[1] == "sum 3.0\n"
