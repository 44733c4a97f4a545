"""The gradient engine: what every rank ends up with is the mean over the ranks, whatever took part in backward."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimum_trn.parallel.buckets import ByParameters, by_elements, make_buckets
from optimum_trn.parallel.gradients import AllReduced, Scattered
from optimum_trn.parallel.topology import Topology
from optimum_trn.parallel.traffic import Traffic
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks


def test_runs_of_elements_are_equal_and_complete():
    lengths = [("a", 5), ("b", 1), ("c", 7)]
    spans, chunk = by_elements(lengths, 3)
    assert chunk == 5  # two elements of padding
    for name, length in lengths:
        covered = [place for s in spans if s.name == name for place in range(s.start, s.start + s.length)]
        assert covered == list(range(length))
    taken = [(s.rank, place) for s in spans for place in range(s.offset, s.offset + s.length)]
    assert len(set(taken)) == 13 and max(place for _, place in taken) < chunk


def test_whole_parameters_are_shared_out_evenly_over_all_buckets():
    layout = ByParameters()
    first, _ = layout([("a", 8), ("b", 2)], 2)
    second, chunk = layout([("c", 5), ("d", 3)], 2)
    assert {s.name: s.rank for s in (*first, *second)} == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert layout.owned == [8, 10] and chunk == 8
    assert all(s.start == 0 for s in (*first, *second))


def what_is_left_of_a_model(rank, world_size):
    """Whether a model and its reducer are there once nobody holds them; while they are, so is their process group."""
    left = []
    for scattered in (False, True):
        model = nn.Linear(4, 4).to(local_device())
        parameters = dict(model.named_parameters())
        if scattered:
            buckets = make_buckets(parameters, world_size, by_elements)
            reducer = Scattered(parameters, dist.group.WORLD, world_size, buckets)
        else:
            reducer = AllReduced(parameters, dist.group.WORLD, world_size)
        reducer.begin()
        model(torch.ones(2, 4, device=local_device())).sum().backward()
        reducer.finish()
        references = [weakref.ref(model), weakref.ref(reducer)]
        del model, parameters, reducer
        gc.collect()
        left += [reference() for reference in references]
    return left


def test_a_model_and_its_reducer_go_when_nobody_holds_them():
    assert run_ranks(what_is_left_of_a_model, 1, device="cpu") == [[None] * 4]


def test_buckets_are_in_reverse_order_with_one_dtype_and_bounded():
    parameters = {
        name: nn.Parameter(torch.zeros(10, dtype=dtype))
        for name, dtype in [("a", torch.float32), ("b", torch.float32), ("c", torch.bfloat16), ("d", torch.float32)]
    }
    parameters["c"].grad_dtype = torch.float32
    buckets = make_buckets(parameters, 1, by_elements, capacity=80)
    assert [bucket.names for bucket in buckets] == [("d", "b"), ("c",), ("a",)]
    assert [(bucket.dtype, bucket.grad_dtype) for bucket in buckets] == [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ]


class Branches(nn.Module):
    """Parts that take part in backward, or not, as the test says."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(3, 5, generator=generator)) for name in ("always", "sometimes", "never")}
        )
        self.parts["frozen"] = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)

    def forward(self, scale, sometimes):
        total = (self.parts["always"] * scale).pow(2).sum() + (self.parts["frozen"] * scale).pow(2).sum()
        return total + (self.parts["sometimes"] * scale).pow(3).sum() if sometimes else total


def expected_grads(micro_batches):
    """One process: the mean over the ranks of what each accumulates. `micro_batches[rank]` lists (scale, sometimes)."""
    total: dict[str, torch.Tensor] = {}
    for batches in micro_batches:
        model = Branches()
        for batch in batches:
            model(*batch).backward()
        for name, parameter in model.parts.items():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad / len(micro_batches)
    return total


def reduced(rank, world_size, kind):
    """A plain round, one with accumulation, and one after requires_grad has changed."""
    model = Branches().to(local_device())
    seen = []
    parameters = dict(model.parts.items())
    if kind == "all-reduce":
        reducer = AllReduced(parameters, dist.group.WORLD, world_size, bucket_bytes=100)
    else:
        buckets = make_buckets(parameters, world_size, by_elements, capacity=100)
        reducer = Scattered(parameters, dist.group.WORLD, world_size, buckets)
    reducer.begin()
    # A hook that the user registers later sees the whole gradient of this rank, and may change it.
    hook = parameters["always"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def backward(*batch):
        reducer.begin()
        model(*batch).backward()
        reducer.finish()

    def results():
        if kind == "all-reduce":
            grads = {name: p.grad.cpu() for name, p in parameters.items() if p.grad is not None}
        else:
            grads = {}
            for span, grad in reducer.gradients.items():
                assert span.rank == rank
                part = torch.zeros(parameters[span.name].numel())
                part[span.start : span.start + span.length] = grad.cpu()
                grads[span.name] = grads.get(span.name, 0) + part.view_as(parameters[span.name])
            assert all(parameter.grad is None for parameter in parameters.values())
            reducer.clear()
        for parameter in parameters.values():
            parameter.grad = None
        return grads

    backward(1.0 + rank, rank == 0)
    plain = results()
    with reducer.no_sync():
        backward(2.0 + rank, rank == 1)
    backward(1.0, False)
    accumulated = results()
    parameters["frozen"].requires_grad_(True)
    parameters["always"].requires_grad_(False)
    backward(1.0 + rank, True)
    changed = results()
    assert len(seen) == 3
    hook.remove()
    reducer.close()
    return plain, accumulated, changed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_frozen_unused_accumulated_and_refrozen_parameters_get_the_mean_of_all_ranks(kind, device):
    ranks = run_ranks(reduced, 2, kind, device=device)
    # Where a rank holds a part, the parts of all ranks add up; all ranks agree on what has a gradient.
    for number, expected in enumerate(
        [
            expected_grads([[(1.0, True)], [(2.0, False)]]),
            expected_grads([[(2.0, False), (1.0, False)], [(3.0, True), (1.0, False)]]),
        ]
    ):
        check(kind, [rank[number] for rank in ranks], expected)
    model = Branches()
    frozen = sum(2 * model.parts["frozen"].detach() * scale**2 / 2 for scale in (1.0, 2.0))
    sometimes = expected_grads([[(1.0, True)], [(2.0, True)]])["sometimes"]
    check(kind, [rank[2] for rank in ranks], {"frozen": frozen, "sometimes": sometimes})


def check(kind, found, expected):
    if kind == "reduce-scatter":
        found = [
            {name: sum(part[name] for part in found if name in part) for name in {n for part in found for n in part}}
        ]
    for grads in found:
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad.detach())


def outside(rank, world_size):
    parameter = nn.Parameter(torch.ones(2, device=local_device()))
    reducer = AllReduced({"p": parameter}, dist.group.WORLD, world_size)
    reducer.begin()
    parameter.sum().backward()
    reducer.finish()
    with pytest.raises(RuntimeError, match=r"outside of accelerator.backward"):
        parameter.sum().backward()


def test_a_backward_pass_that_nobody_would_reduce_raises():
    run_ranks(outside, 2)


def overlapped(rank, world_size):
    """What has been reduced when the gradient of the first layer, the last to come, is there."""
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).to(local_device())
    reducer = AllReduced(dict(layers.named_parameters()), dist.group.WORLD, world_size, bucket_bytes=64)
    arrived = []
    with Traffic(Topology((0,) * world_size, cores_per_chip=4)) as traffic:
        reducer.begin()
        layers[0].weight.register_post_accumulate_grad_hook(lambda _: arrived.append(traffic.over("chip")))
        layers(torch.ones(2, 4, device=local_device())).sum().backward()
        reducer.finish()
    return arrived, traffic.over("chip")


@pytest.mark.parametrize("device", DEVICES)
def test_buckets_are_sent_while_backward_still_runs(device):
    for arrived, total in run_ranks(overlapped, 2, device=device):
        assert arrived == [3 * 64]  # of four layers
        assert total == 4 * 64 + 4 * 4  # and which of them have a gradient
