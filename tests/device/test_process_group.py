"""The c10d backend `neuron`: what every collective returns, what it refuses, and what the death of a rank does."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks

WORLD = 3
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64,)
MOVABLE = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn)
OPERATIONS = {
    "SUM": lambda stack: stack.sum(0),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "AVG": lambda stack: stack.sum(0) / len(stack),
}
BITWISE = {"BAND": lambda a, b: a & b, "BOR": lambda a, b: a | b, "BXOR": lambda a, b: a ^ b}


def on_ranks(function, *args, world_size=WORLD, **kwargs):
    return run_ranks(function, world_size, *args, environment=FLOAT64, **kwargs)


def values(rank, dtype, length=6):
    """Small numbers that differ by rank and are exact in every type."""
    numbers = (torch.arange(length) * (rank + 2) + rank) % 5 + 1
    return numbers.remainder(2).bool() if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


def stacked(world_size, dtype, length=6):
    return torch.stack([values(r, dtype, length) for r in range(world_size)])


# -------------------------------------------------------------------------------------------------------- reductions


def reduce_everywhere(rank, world_size, device):
    local_device()
    seen = {}
    for dtype in (*FLOATS, *INTEGERS):
        for name, expected in OPERATIONS.items():
            if name == "AVG" and not dtype.is_floating_point:
                continue
            wide = stacked(world_size, dtype, 6).to(torch.float64 if dtype.is_floating_point else torch.int64)
            want = expected(wide).to(dtype)
            op = getattr(dist.ReduceOp, name)

            tensor = values(rank, dtype).to(device)
            dist.all_reduce(tensor, op)
            seen[f"all_reduce {name} {dtype}"] = torch.allclose(tensor.cpu().float(), want.float(), rtol=1e-2)

            mine = values(rank, dtype).to(device)
            before = mine.cpu()
            dist.reduce(mine, dst=1, op=op)
            answer = want if rank == 1 else before
            seen[f"reduce {name} {dtype}"] = torch.allclose(mine.cpu().float(), answer.float(), rtol=1e-2)

            part = torch.empty(2, dtype=dtype, device=device)
            source = values(rank, dtype).to(device)
            dist.reduce_scatter_tensor(part, source, op)
            mine = want.chunk(world_size)[rank]
            seen[f"reduce_scatter_tensor {name} {dtype}"] = torch.allclose(part.cpu().float(), mine.float(), rtol=1e-2)
            assert torch.equal(source.cpu(), values(rank, dtype)), "reduce_scatter must not touch its input"

            part.zero_()
            dist.reduce_scatter(part, list(source.chunk(world_size)), op)
            seen[f"reduce_scatter {name} {dtype}"] = torch.allclose(part.cpu().float(), mine.float(), rtol=1e-2)
    for dtype in (*INTEGERS, torch.bool):
        for name, expected in BITWISE.items():
            want = values(0, dtype)
            for other in range(1, world_size):
                want = expected(want, values(other, dtype))
            tensor = values(rank, dtype).to(device)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            seen[f"all_reduce {name} {dtype}"] = torch.equal(tensor.cpu(), want)
    logical = values(rank, torch.bool).to(device)
    dist.all_reduce(logical)
    seen["bool SUM is OR"] = torch.equal(logical.cpu(), stacked(world_size, torch.bool).any(0))
    number = (values(rank, torch.float32) * (1 + 2j)).to(device)
    dist.all_reduce(number, dist.ReduceOp.AVG)
    seen["complex AVG"] = torch.allclose(number.cpu(), stacked(world_size, torch.float32).mean(0) * (1 + 2j))
    for factor in (0.25, torch.tensor([0.25], device=device)):
        scaled = values(rank, torch.float32).to(device)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(factor))
        seen[f"PREMUL_SUM {type(factor)}"] = torch.allclose(scaled.cpu(), stacked(world_size, torch.float32).sum(0) / 4)
    return [name for name, right in seen.items() if not right], len(seen)


@pytest.mark.parametrize("device", ["neuron", "cpu"])
def test_every_reduction_in_every_type(device):
    for wrong, count in on_ranks(reduce_everywhere, device):
        assert wrong == [] and count > 150


def average_twice_waited(rank, world_size):
    out = torch.zeros(1, device="neuron")
    work = dist.reduce_scatter_tensor(
        out, torch.full((world_size,), float(rank), device="neuron"), dist.ReduceOp.AVG, async_op=True
    )
    work.wait()
    first = out.item()
    out.fill_(7)
    work.wait()  # gloo's own work copies its result out again here
    return first, out.item()


def test_a_second_wait_does_not_write_the_output_again():
    assert on_ranks(average_twice_waited) == [(1.0, 7.0)] * WORLD


# ------------------------------------------------------------------------------------------------------ moving data


def move(rank, world_size, device):
    local_device()
    seen = {}

    def equal(a, b):
        return a.dtype == b.dtype and torch.equal(
            a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
        )

    for dtype in MOVABLE:
        tensor = values(rank, dtype).to(device)
        copy = tensor.clone()
        dist.broadcast(copy, src=1)
        seen[f"broadcast {dtype}"] = equal(copy, values(1, dtype))

        outputs = [torch.empty(2, 3, dtype=dtype, device=device) for _ in range(world_size)]
        dist.all_gather(outputs, tensor.view(2, 3))
        seen[f"all_gather {dtype}"] = all(equal(o.flatten(), values(r, dtype)) for r, o in enumerate(outputs))

        for shape in ((world_size * 6,), (world_size * 2, 3), (world_size, 2, 3)):  # accelerate passes flat outputs
            output = torch.empty(shape, dtype=dtype, device=device)
            dist.all_gather_into_tensor(output, tensor.view(2, 3))
            want = torch.cat([values(r, dtype).view(torch.uint8) for r in range(world_size)]).view(dtype)
            seen[f"all_gather_into_tensor {shape} {dtype}"] = equal(output.flatten(), want)

        gathered = [torch.empty_like(tensor) for _ in range(world_size)] if rank == 2 else None
        dist.gather(tensor, gathered, dst=2)
        if gathered:
            seen[f"gather {dtype}"] = all(equal(o, values(r, dtype)) for r, o in enumerate(gathered))

        received = torch.empty_like(tensor)
        dist.scatter(
            received, [values(10 + r, dtype).to(device) for r in range(world_size)] if rank == 0 else None, src=0
        )
        seen[f"scatter {dtype}"] = equal(received, values(10 + rank, dtype))

        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor)
        want = torch.cat([values(r, dtype).view(torch.uint8).chunk(world_size)[rank] for r in range(world_size)]).view(
            dtype
        )
        seen[f"all_to_all_single {dtype}"] = equal(output, want)

        outputs = [torch.empty(r + 1, dtype=dtype, device=device) for r in range(world_size)]
        dist.all_to_all(outputs, [values(rank, dtype, rank + 1).to(device) for _ in range(world_size)])
        seen[f"all_to_all uneven {dtype}"] = all(equal(o, values(r, dtype, r + 1)) for r, o in enumerate(outputs))

        outputs = [torch.empty(r + 1, dtype=dtype, device=device) for r in range(world_size)]
        dist.all_gather(outputs, values(rank, dtype, rank + 1).to(device))
        seen[f"all_gather uneven {dtype}"] = all(equal(o, values(r, dtype, r + 1)) for r, o in enumerate(outputs))

        successor, predecessor = (rank + 1) % world_size, (rank - 1) % world_size
        received = torch.empty_like(tensor)
        request = dist.isend(tensor, successor, tag=3)
        dist.recv(received, predecessor, tag=3)
        request.wait()
        seen[f"send and recv {dtype}"] = equal(received, values(predecessor, dtype))
    return [name for name, right in seen.items() if not right], len(seen)


@pytest.mark.parametrize("device", ["neuron", "cpu"])
def test_every_type_moves_through_every_collective(device):
    for wrong, count in on_ranks(move, device):
        assert wrong == [] and count > 100


def corners(rank, world_size):
    empty = torch.empty(0, 4, device="neuron")
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.empty(0, device="neuron"), empty)
    scalar = torch.tensor(float(rank), device="neuron")
    dist.all_reduce(scalar)
    columns_last = values(rank, torch.float32, 24).view(1, 2, 3, 4).to("neuron").to(memory_format=torch.channels_last)
    dist.all_reduce(columns_last)
    anyone = torch.zeros(1, device="neuron")
    source = None
    if rank == 0:
        source = dist.recv(anyone)
    elif rank == 1:
        dist.send(torch.ones(1, device="neuron"), 0)
    sizes = [3 if r == 0 else 2 for r in range(world_size)]
    out = torch.empty(sizes[rank] * world_size, device="neuron")
    dist.all_to_all_single(
        out, torch.full((sum(sizes),), float(rank), device="neuron"), [sizes[rank]] * world_size, sizes
    )
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    box = [rank * 10]
    dist.broadcast_object_list(box, src=2)
    dist.barrier()
    return (
        scalar.item(),
        torch.equal(columns_last.cpu(), stacked(world_size, torch.float32, 24).sum(0).view(1, 2, 3, 4)),
        source,
        out.cpu().tolist(),
        objects,
        box,
    )


def test_corner_cases():
    for rank, (scalar, channels_last, source, exchanged, objects, box) in enumerate(on_ranks(corners)):
        assert scalar == 3.0 and channels_last
        assert source == (1 if rank == 0 else None)
        assert exchanged == [float(r) for r in range(WORLD) for _ in range(3 if rank == 0 else 2)]
        assert objects == [{"rank": r} for r in range(WORLD)] and box == [20]


def coalesced(rank, world_size):
    tensors = [torch.full((n,), float(rank), device="neuron") for n in (1, 5)]
    with dist._coalescing_manager(device=torch.device("neuron")):
        for tensor in tensors:
            dist.all_reduce(tensor)
    outputs = [torch.empty(world_size * n, device="neuron") for n in (1, 5)]
    with dist._coalescing_manager(device=torch.device("neuron"), async_ops=True) as manager:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    manager.wait()
    parts = [torch.empty(n, device="neuron") for n in (1, 5)]
    with dist._coalescing_manager(device=torch.device("neuron")):
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output, dist.ReduceOp.AVG)
    received = torch.empty(2, device="neuron")
    for request in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(rank), device="neuron"), (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
        ]
    ):
        request.wait()
    lists = [[torch.empty(1, device="neuron"), torch.empty(5, device="neuron")] for _ in range(world_size)]
    dist.group.WORLD._get_backend(torch.device("neuron")).allgather_coalesced(lists, parts).wait()
    return [t.cpu().tolist() for t in (*tensors, *parts, received)], [t[1][0].item() for t in lists]


def test_coalesced_forms():
    for rank, ((one, five, part, parts, received), lists) in enumerate(on_ranks(coalesced)):
        assert one == [3.0] and five == [3.0] * 5 and part == [3.0] and parts == [3.0] * 5
        assert received == [float((rank - 1) % WORLD)] * 2 and lists == [3.0] * WORLD


# ---------------------------------------------------------------------------------------- groups, meshes, DTensor


class Owned:
    """A Python object that a tensor owns; it remembers which thread destroyed it."""

    def __init__(self, destroyers):
        self.destroyers = destroyers

    def __del__(self):
        self.destroyers.append(threading.get_ident())


def forget_tensors(rank, world_size, device):
    store = dist.distributed_c10d._get_default_store()
    destroyers = []

    def let_go(count):
        # What is finished is let go of when the group is called, or one of its operations waited for; the thread that
        # finished it may still be looking at it.
        barrier = dist.barrier(async_op=True)
        deadline = time.monotonic() + 60
        while len(destroyers) < count and time.monotonic() < deadline:
            barrier.wait()

    for number, call in enumerate(("all_reduce", "broadcast", "transfer"), 1):
        tensor = torch.ones(5, device=device)
        tensor.owned = Owned(destroyers)
        if rank == 1:
            store.wait([f"{call} forgotten"])
        if call == "all_reduce":
            dist.all_reduce(tensor, async_op=True)
        elif call == "broadcast":
            dist.broadcast(tensor, src=1, async_op=True)
        elif rank == 0:
            dist.irecv(tensor, src=1)
        else:
            dist.isend(tensor, dst=0)
        del tensor  # the operation is its last owner now, and on rank 0 it isn't finished
        store.set(f"{call} forgotten", "") if rank == 0 else None
        let_go(number)
    return len(destroyers), set(destroyers) <= {threading.get_ident()}


@pytest.mark.parametrize("device", ["neuron", "cpu"])
def test_what_a_tensor_owns_is_destroyed_by_a_thread_of_the_user(device):
    # Any other thread may ask for the interpreter while it shuts down, which aborts the process.
    assert on_ranks(forget_tensors, device, world_size=2) == [(3, True)] * 2


def meshes(rank, world_size):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("neuron", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.full((2,), float(rank), device="neuron")
    dist.all_reduce(tensor, group=mesh["tp"].get_group())
    pair = dist.new_group([0, 3])
    other = torch.full((1,), float(rank), device="neuron")
    if rank in (0, 3):
        dist.all_reduce(other, dist.ReduceOp.AVG, group=pair)
    lazy = functional.all_reduce(torch.full((2,), float(rank), device="neuron"), "sum", mesh["dp"])
    gathered = functional.all_gather_tensor(torch.full((1,), float(rank), device="neuron"), 0, mesh["tp"])
    scattered = functional.reduce_scatter_tensor(torch.full((2,), float(rank), device="neuron"), "avg", 0, mesh["tp"])
    full = torch.arange(16.0, device="neuron").view(4, 4)
    sharded = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    product = (sharded @ distribute_tensor(full, mesh, [Replicate(), Shard(0)])).full_tensor()
    uneven = distribute_tensor(torch.arange(5.0, device="neuron"), mesh, [Replicate(), Shard(0)])
    assert isinstance(sharded, DTensor) and sharded.to_local().shape == (2, 2)
    return (
        tensor[0].item(),
        other.item(),
        lazy.cpu().tolist(),
        gathered.cpu().tolist(),
        scattered.cpu().tolist(),
        torch.equal(product.cpu(), (full @ full).cpu()),
        uneven.full_tensor().cpu().tolist(),
        sharded.to_local().device.index,
    )


def test_groups_meshes_functional_collectives_and_dtensor():
    for rank, result in enumerate(on_ranks(meshes, world_size=4)):
        tensor, other, lazy, gathered, scattered, product, uneven, index = result
        assert tensor == (1.0 if rank < 2 else 5.0)
        assert other == {0: 1.5, 3: 1.5}.get(rank, float(rank))
        assert lazy == [float(rank % 2 * 2 + 2)] * 2
        assert gathered == [float(rank // 2 * 2), float(rank // 2 * 2 + 1)]
        assert scattered == [rank // 2 * 2 + 0.5]
        assert product and uneven == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert index == rank


# ------------------------------------------------------------------------------------------------------ wrong calls


def wrong_calls(rank, world_size):
    def neuron(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device="neuron")

    calls = {
        "not contiguous": lambda: dist.all_reduce(neuron(4, 4)[:, ::2]),
        "would round": lambda: dist.all_reduce(neuron(2, dtype=torch.int64), dist.ReduceOp.AVG),
        "cannot be reduced": lambda: dist.all_reduce(neuron(2).to(torch.float8_e4m3fn)),
        "needs integers": lambda: dist.all_reduce(neuron(2), dist.ReduceOp.BAND),
        "3 ranks send 4 each": lambda: dist.all_gather_into_tensor(neuron(9), neuron(4)),
        "3 ranks receive 2 each": lambda: dist.reduce_scatter_tensor(neuron(2), neuron(7)),
        "2 input tensors for 3": lambda: dist.reduce_scatter(neuron(2), [neuron(2)] * 2),
        "differ in type": lambda: dist.group.WORLD._allgather_base(neuron(6), neuron(2, dtype=torch.int32)),
        "do not divide": lambda: dist.all_to_all_single(neuron(4), neuron(4)),
        "add up to 5": lambda: dist.all_to_all_single(neuron(4), neuron(4), [1, 1, 3], [1, 1, 2]),
        "dense tensors": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        "this rank itself": lambda: dist.group.WORLD.send([neuron(1)], rank, 0),
        "meta": lambda: dist.group.WORLD._get_backend(torch.device("neuron")).allreduce(
            [torch.empty(2, device="meta")]
        ),
    }
    missed = []
    for text, call in calls.items():
        try:
            call()
            missed.append(f"{text}: nothing raised")
        except (ValueError, TypeError, RuntimeError) as error:
            if text not in str(error):
                missed.append(f"{text}: {error}")
    dist.barrier()  # and the group is still usable
    return missed


def test_a_wrong_call_raises_and_the_group_goes_on():
    assert on_ranks(wrong_calls) == [[]] * WORLD


# ------------------------------------------------------------------------------------------------------------- death


def wait_for_the_dead(rank, world_size):
    survivors = dist.new_group([0, 1])  # does not hold the victim
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 3:
        store.wait([f"starting {peer}" for peer in range(3)])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"starting {rank}", "")
    start = time.monotonic()
    text = "nothing raised"
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(1000, device="neuron"))
        elif rank == 1:  # DistributedDataParallel waits for futures
            dist.all_reduce(torch.ones(1000, device="neuron"), async_op=True).get_future().wait()
        else:
            dist.recv(torch.ones(1, device="neuron"), 0)  # a peer that lives and never sends
    except RuntimeError as error:
        text = str(error)
    seconds = time.monotonic() - start
    try:
        dist.all_reduce(torch.ones(1, device="neuron"))
        later = "went through"
    except dist.DistBackendError as error:
        later = str(error)
    tensor = torch.ones(1, device="neuron")
    if rank in (0, 1):
        dist.all_reduce(tensor, group=survivors)
    return seconds, text, later, tensor.item()


def test_the_death_of_a_rank_is_an_error_on_every_other_at_once():
    results = on_ranks(wait_for_the_dead, world_size=4, may_die=[3])
    assert results[3] is None
    for rank, (seconds, text, later, survivors) in enumerate(results[:3]):
        assert seconds < 20, "plain gloo waits for its timeout, here 120 s"
        assert "rank 3 of the group died" in text and f"on rank {rank} of 4" in text
        assert "rank 3 of the group died" in later
        assert survivors == (2.0 if rank < 2 else 1.0), "a group without the victim goes on"


def go_astray(rank, world_size, kind):
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=8))
    dist.barrier(group)
    tensor, shards = torch.ones(4, device="neuron"), torch.ones(4 * world_size, device="neuron")
    calls = [
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.all_gather_into_tensor(shards, tensor, group=group),
    ]
    if rank == 2 and kind == "reordered":
        calls.reverse()
    if rank == 2 and kind == "left out":
        calls.pop(0)
    try:
        for call in calls:
            call()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("kind", ["reordered", "left out"])
def test_a_rank_that_calls_in_another_order_is_named_on_every_rank(kind):
    for rank, text in enumerate(on_ranks(go_astray, kind, world_size=3)):
        assert "The ranks differ in call 2 of this group: rank 2 called all_gather_into_tensor of 4 Float" in text, (
            rank,
            text,
        )
        assert "but ranks 0 and 1 called all_reduce of 4 Float" in text
