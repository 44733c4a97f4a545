"""PyTorch around the device: FSDP2, DDP, pipelining, DTensor, distributed checkpoints, recomputation, the profiler."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed import run_ranks

STEPS = 3


class Block(nn.Module):
    """A residual MLP; with `recompute` its activations are thrown away and computed again."""

    def __init__(self, width=16, dropout=0.0, recompute=None):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)
        self.recompute = recompute

    def inside(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))

    def forward(self, x):
        if self.recompute is None:
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.recompute == "reentrant")


def blocks(count=3, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(count)))


def batches(world_size):
    """One batch per step, as (world size, rows, width) on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(world_size, 4, 16, generator=generator) for _ in range(STEPS)]


def train(model, steps, optimizer=None, before_step=None):
    """Losses of plain training on these batches; `before_step(i)` runs before each optimizer step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, batch in enumerate(steps):
        loss = model(batch).square().mean()
        loss.backward()
        if before_step:
            before_step(i)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_process(world_size):
    """Loss of each rank's rows and the weights at the end, computed in one process on the CPU."""
    model, seen, norms = blocks(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(world_size):
        losses = [model(rows).square().mean() for rows in batch]
        torch.stack(losses).mean().backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.item() for loss in losses])
    return list(zip(*seen, strict=True)), norms, [p.detach() for p in model.parameters()]


def on_device(rank, world_size):
    return [batch[rank].to("neuron") for batch in batches(world_size)]


# --------------------------------------------------------------------------------------------------- data parallelism


def sharded(rank, world_size, shape):
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("neuron", shape, mesh_dim_names=names)
    model = blocks().to("neuron")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    norms = []

    def norm(_):
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norms.append(total.full_tensor().item())

    losses = train(model, on_device(rank, world_size), before_step=norm)
    assert model[0].up.weight.to_local().device == torch.device("neuron", rank)
    return losses, norms, [p.full_tensor().detach().cpu() for p in model.parameters()]


def distributed_data_parallel(rank, world_size, options):
    model = DistributedDataParallel(blocks().to("neuron"), device_ids=[rank], **options)
    norms = []

    def norm(_):
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    losses = train(model, on_device(rank, world_size), before_step=norm)
    return losses, norms, [p.detach().cpu() for p in model.parameters()]


def assert_equals_one_process(results):
    losses, norms, weights = one_process(len(results))
    for rank, (seen, seen_norms, seen_weights) in enumerate(results):
        assert seen == pytest.approx(list(losses[rank]), rel=1e-5)
        assert seen_norms == pytest.approx(norms, rel=1e-4), "a sum in place of the average hides in AdamW's loss"
        for ours, theirs in zip(seen_weights, weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_fsdp2_equals_one_process(shape):
    assert_equals_one_process(run_ranks(sharded, torch.Size(shape).numel(), shape))


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "bucket views", "looks for unused", "static graph"],
)
def test_ddp_equals_one_process(options):
    assert_equals_one_process(run_ranks(distributed_data_parallel, 2, options))


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def unused_parameters(rank, world_size):
    torch.manual_seed(0)
    model = DistributedDataParallel(HalfUsed().to("neuron"), device_ids=[rank], find_unused_parameters=True)
    for _ in range(2):
        with model.no_sync():
            model(torch.full((1, 4), float(rank), device="neuron")).sum().backward()
        model(torch.full((1, 4), float(rank), device="neuron")).sum().backward()
        gradient = model.module.used.weight.grad[0, 0].item()
        unused = model.module.unused.weight.grad
        model.zero_grad()
    return gradient, unused is None


def test_ddp_with_unused_parameters_and_accumulation():
    assert run_ranks(unused_parameters, 2) == [(1.0, True)] * 2  # (0 + 1) / 2, twice


def accumulating_mics(rank, world_size):
    """The replica all-reduce of a 2-D mesh only at the accumulation boundary."""
    mesh = init_device_mesh("neuron", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(blocks(1).to("neuron"), mesh=mesh)
    x = torch.full((2, 16), float(rank + 1), device="neuron")
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model(x).sum().backward()
    return model[0].down.bias.grad.full_tensor().sum().item()


def test_hsdp_reduces_replicas_at_the_boundary():
    first, *rest = run_ranks(accumulating_mics, 4)
    assert rest == pytest.approx([first] * 3) and first == pytest.approx(2 * 2 * 16)  # two passes of two rows


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_under_dropout_on_the_device(recompute):
    gradients = []
    for kind in (None, recompute):
        model = blocks(dropout=0.5, recompute=kind).to("neuron")
        x = torch.ones(2, 16, device="neuron", requires_grad=True)
        torch.manual_seed(2)
        model(x).sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def recomputation_when_sharded(rank, world_size, wrap):
    results = []
    for recompute in (None, "non-reentrant"):
        model = blocks(dropout=0.5, recompute=recompute).to("neuron")
        if wrap == "fsdp":
            for block in model:
                fully_shard(block)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model, device_ids=[rank])
        torch.manual_seed(rank)
        results.append(train(model, on_device(rank, world_size)))
    return results


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_recomputation_when_sharded(wrap):
    for plain, recomputed in run_ranks(recomputation_when_sharded, 2, wrap):
        assert plain == recomputed


# ------------------------------------------------------------------------------------------------------- pipelining


def pipeline(rank, world_size, schedule):
    from torch.distributed import pipelining

    stages = blocks(world_size).to("neuron")
    stage = pipelining.PipelineStage(stages[rank], rank, world_size, torch.device("neuron", rank))
    schedule = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, y = torch.ones(8, 16, device="neuron"), torch.zeros(8, 16, device="neuron")
    losses = []
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == world_size - 1 else {}))
    return [loss.item() for loss in losses], stages[rank].up.weight.grad.cpu()


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
def test_pipelining_equals_one_process(schedule):
    results = run_ranks(pipeline, 3, schedule)
    model = blocks(3)
    loss = nn.functional.mse_loss(model(torch.ones(8, 16)), torch.zeros(8, 16))
    loss.backward()
    assert results[-1][0] == pytest.approx([loss.item()] * 4, rel=1e-5)
    for block, (_, gradient) in zip(model, results, strict=True):
        torch.testing.assert_close(gradient, block.up.weight.grad, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- DTensor


def random_dtensors(rank, world_size):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty

    mesh = init_device_mesh("neuron", (world_size,))
    torch.manual_seed(3)
    sharded_normal = nn.init.normal_(empty(8, 4, device_mesh=mesh, placements=[Shard(0)]))
    replicated_normal = nn.init.normal_(empty(8, 4, device_mesh=mesh, placements=[Replicate()]))
    ones = torch.ones(64, device="neuron")
    sharded_mask = nn.functional.dropout(distribute_tensor(ones, mesh, [Shard(0)]), 0.5)
    replicated_mask = nn.functional.dropout(distribute_tensor(ones, mesh, [Replicate()]), 0.5)
    return [t.to_local().detach().cpu() for t in (sharded_normal, sharded_mask, replicated_normal, replicated_mask)]


def test_dtensor_random_numbers_differ_between_shards_and_agree_between_replicas():
    (normal0, mask0, replica0, dropped0), (normal1, mask1, replica1, dropped1) = run_ranks(random_dtensors, 2)
    assert not torch.equal(normal0, normal1) and not torch.equal(mask0, mask1)
    assert torch.equal(replica0, replica1) and torch.equal(dropped0, dropped1)
    assert set(torch.cat([mask0, mask1]).tolist()) == {0.0, 2.0} and abs(replica0.mean()) < 1


# ------------------------------------------------------------------------------------------- distributed checkpoints


def saved_and_loaded(rank, world_size, directory, asynchronous):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def sharded_model():
        model = blocks().to("neuron")
        for block in model:
            fully_shard(block)
        model = fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = sharded_model()
    rows = on_device(rank, world_size)
    train(model, rows, optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if asynchronous:
        host = dist.new_group(backend="gloo")
        dcp.async_save(states, checkpoint_id=directory, process_group=host).result()
    else:
        dcp.save(states, checkpoint_id=directory)
    expected = train(model, rows, optimizer)

    fresh, fresh_optimizer = sharded_model()
    states = dict(zip(("model", "optimizer"), get_state_dict(fresh, fresh_optimizer), strict=True))
    dcp.load(states, checkpoint_id=directory)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert fresh[0].up.weight.device.type == "neuron"
    return expected, train(fresh, rows, fresh_optimizer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoint_resumes_exactly(tmp_path, asynchronous):
    for expected, resumed in run_ranks(saved_and_loaded, 2, str(tmp_path / "checkpoint"), asynchronous):
        assert resumed == expected


# ------------------------------------------------------------------------------------------------- one process


def test_the_profiler_sees_the_devices_operators():
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(8, 8, device="neuron", requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.NEURON], profile_memory=True) as run:
        (x @ x).relu().sum().backward()
    names = {event.key for event in run.key_averages()}
    assert {"aten::mm", "aten::relu", "aten::sum"} <= names
    assert "aten::mm" in run.key_averages().table(sort_by="self_cpu_time_total", row_limit=5)


def test_a_deep_copy_and_a_saved_file_stay_on_the_device(tmp_path):
    model = blocks().to("neuron")
    twin = copy.deepcopy(model)
    assert twin[0].up.weight.device.type == "neuron" and twin[0].up.weight.data_ptr() != model[0].up.weight.data_ptr()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for target in ("neuron", "cpu", "neuron:1", None):
        weights = torch.load(tmp_path / "weights.pt", map_location=target)
        assert torch.equal(weights["0.up.weight"].cpu(), model[0].up.weight.cpu())
        assert weights["0.up.weight"].device.type == ("cpu" if target == "cpu" else "neuron")
