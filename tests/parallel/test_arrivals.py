"""Updated parameters arrive while forward runs: a bucket is waited for where it is first read, by whoever reads it."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from optimum_trn.parallel.arrivals import PendingParameter
from optimum_trn.parallel.zero1 import Zero1Optimizer
from tests.devices import DEVICES, local_device
from tests.distributed import run_ranks

SIZE = 4


class Net(nn.Module):
    """Weights that are used out of order, twice, outside of their own module's forward, and by a held reference."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(8, SIZE)
            self.recurrent = nn.LSTM(SIZE, SIZE)  # keeps its parameters in a list of its own
            self.middle = nn.Linear(SIZE, SIZE)
            self.functional = nn.Linear(SIZE, SIZE)
            self.head = nn.Linear(SIZE, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.held = [*self.middle.parameters()]

    def forward(self, tokens):
        hidden = self.recurrent(self.embedding(tokens))[0]
        hidden = F.linear(hidden, *self.held)
        hidden = F.linear(hidden.tanh(), self.functional.weight, self.functional.bias)
        return self.head(hidden).pow(2).mean()


class Work:
    """The work of a collective, which writes down when it is waited for."""

    def __init__(self, work, events, name):
        self.work, self.events, self.name = work, events, name

    def wait(self):
        self.events.append(f"wait {self.name}")
        return self.work.wait()


def sharded(model, bucket_bytes=100):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    group = dist.group.WORLD
    return Zero1Optimizer(optimizer, dict(model.named_parameters()), group, dist.get_world_size(), bucket_bytes)


def backward(model, optimizer, tokens):
    optimizer.reducer.begin()
    loss = model(tokens)
    loss.backward()
    optimizer.reducer.finish()
    return loss.item()


def tokens_of(rank):
    return torch.arange(6).add(rank).remainder(8).view(3, 2).to(local_device())


def order_of_waits(rank, world_size):
    model = Net().to(local_device())
    optimizer = sharded(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    events = []
    for path, module in model.named_children():
        module.register_forward_pre_hook(lambda *_, path=path: events.append(f"enter {path}"))
    gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    buckets = []

    def gather_into(*args, **kwargs):
        bucket = optimizer.reducer.buckets[-1 - len(buckets)]
        buckets.append(bucket.names)
        events.append("gather")
        return Work(gather(*args, **kwargs), events, bucket.names[-1])

    def scattered(*args, **kwargs):
        events.append("reduce-scatter")
        return reduce_scatter(*args, **kwargs)

    backward(model, optimizer, tokens_of(rank))
    events.clear()
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gather_into, scattered
    try:
        optimizer.step()
        model.zero_grad()
        assert {type(parameter) for parameter in model.parameters()} == {PendingParameter}
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        events.append("step done")
        optimizer.reducer.begin()
        loss = model(tokens_of(rank))
        events.append("forward done")
        loss.backward()
        events.append("backward done")
        optimizer.reducer.finish()
    finally:
        dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gather, reduce_scatter
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert names == {id(parameter): name for name, parameter in model.named_parameters()}
    return events, buckets


@pytest.mark.parametrize("device", DEVICES)
def test_a_bucket_is_waited_for_where_forward_first_reads_it_and_gradients_are_sent_inside_backward(device):
    for events, buckets in run_ranks(order_of_waits, 2, device=device):
        done = events.index("step done")
        assert events[:done] == ["gather"] * len(buckets), "step itself waits for a bucket"
        forward = events[done + 1 : events.index("forward done")]
        first = [events.index(f"wait {names[-1]}") for names in buckets]
        assert first == sorted(first), "the buckets are not in the order of forward"
        owners = {names[-1]: {name.split(".")[0] for name in names} for names in buckets}
        for module in ("embedding", "recurrent"):
            wait = next(n for n, event in enumerate(forward) if module in owners.get(event[len("wait ") :], ()))
            assert wait > forward.index(f"enter {module}")
        assert forward.index("wait embedding.weight") < forward.index("enter recurrent")
        assert [e for e in forward if e.startswith("wait")] == [f"wait {names[-1]}" for names in buckets]
        assert events.index("reduce-scatter") < events.index("backward done")


def losses(rank, world_size, overlaps):
    model = Net().to(local_device())
    optimizer = sharded(model)
    optimizer.overlaps = overlaps
    found = []
    for _ in range(3):
        found.append(backward(model, optimizer, tokens_of(rank)))
        optimizer.step()
    return found, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_weights_are_bit_for_bit_those_of_waiting_at_once(device):
    for (found, weights), (expected, at_once) in zip(
        run_ranks(losses, 2, True, device=device), run_ranks(losses, 2, False, device=device), strict=True
    ):
        assert found == expected
        assert all(torch.equal(weights[name], at_once[name]) for name in at_once)


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False).state_dict()


READERS = {
    "state_dict": lambda model, held: model.state_dict(),
    "a copy of the model": lambda model, held: copy.deepcopy(model).state_dict(),
    "a pickle": lambda model, held: saved(model),
    "moved": lambda model, held: model.cpu().state_dict(),
    "data": lambda model, held: {name: parameter.data for name, parameter in model.named_parameters()},
    "held references": lambda model, held: {name: parameter * 1 for name, parameter in held.items()},
    "lists": lambda model, held: dict(zip(held, torch._foreach_mul([*held.values()], 1), strict=True)),
    "views": lambda model, held: {name: parameter[...] for name, parameter in held.items()},
    "numbers": lambda model, held: {name: torch.tensor(parameter.tolist()) for name, parameter in held.items()},
    "iteration": lambda model, held: {name: torch.stack([*parameter]) for name, parameter in held.items()},
    "settle": None,
}


def read_by_all(rank, world_size):
    found = {}
    for reader, read in READERS.items():
        model = Net().to(local_device())
        held = dict(model.named_parameters())
        optimizer = sharded(model)
        backward(model, optimizer, tokens_of(rank))
        optimizer.step()
        assert all(type(parameter) is PendingParameter for parameter in held.values())
        if read is None:
            optimizer.settle()
            assert all(type(parameter) is nn.Parameter for parameter in held.values())
            values = model.state_dict()
        else:
            values = read(model, held)
        found[reader] = {name: values[name].detach().float().cpu() for name in held}
        optimizer.reducer.close()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_reads_a_parameter_has_its_new_values(device):
    start = Net().state_dict()
    for found in run_ranks(read_by_all, 2, device=device):
        for reader, values in found.items():
            for name, value in values.items():
                assert not torch.equal(value, start[name]), (reader, name)
                torch.testing.assert_close(value, found["settle"][name], rtol=0, atol=0, msg=f"{reader}: {name}")


def written(rank, world_size):
    """What someone writes after a step stays; a second step without a forward pass starts from the first."""
    model = Net().to(local_device())
    optimizer = sharded(model)
    backward(model, optimizer, tokens_of(rank))
    optimizer.step()
    with torch.no_grad():
        model.middle.bias.fill_(7.0)
    model.functional.bias.data = torch.full_like(model.functional.bias, 5.0)
    optimizer.settle()
    assert (model.middle.bias == 7).all()
    assert (model.functional.bias == 5).all()
    with torch.inference_mode():
        model(tokens_of(rank))
    backward(model, optimizer, tokens_of(rank))  # parameters that arrived in inference mode can be trained


def test_what_is_written_while_parameters_arrive_stays():
    run_ranks(written, 2, device="cpu")
