"""ZeRO-1: any optimizer, cut over the ranks, takes the steps that it takes whole, with its part of the memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Adafactor

from optimum_trn.errors import CheckpointError
from optimum_trn.parallel.granularity import Granularity, granularity_of
from optimum_trn.parallel.zero1 import Zero1Optimizer
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks

STEPS = 3


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: the sign of an average of the gradients (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    parameter.add_((0.9 * average + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                    average.lerp_(parameter.grad, 0.01)


class Normalized(Lion):
    """Steps by the direction of all gradients together."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"])


class Lamb(Lion):
    """Steps in proportion to the norm of the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * parameter.norm() / parameter.grad.norm(), alpha=group["lr"])


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Lion": lambda groups: Lion(groups, lr=1e-2),
    "Adafactor": lambda groups: Adafactor(groups, lr=1e-2, relative_step=False, scale_parameter=True),
    "Lamb": lambda groups: Lamb(groups, lr=1e-2),
}
WHOLE = {"Adafactor", "Lamb"}


class Net(nn.Module):
    """Sizes that no number of ranks divides, a frozen parameter, and one that never gets a gradient."""

    def __init__(self, dtype):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(7, 5)
            self.second = nn.Linear(5, 3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.unused = nn.Parameter(torch.randn(4))
        self.to(dtype)

    def forward(self, x):
        return self.frozen(self.second(torch.tanh(self.first(x)))).pow(2).sum()


def groups_of(model):
    return [
        {"params": [model.first.weight, model.second.weight, model.unused], "weight_decay": 0.1},
        {"params": [model.first.bias, model.second.bias], "weight_decay": 0.0},
    ]


def batches(dtype, ranks):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, ranks, 4, 7, generator=generator).to(dtype)


def whole(name, dtype, ranks):
    model = Net(dtype)
    optimizer = OPTIMIZERS[name](groups_of(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in batches(dtype, ranks):
        (sum(model(x) for x in step) / ranks).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    memory = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    return model.state_dict(), memory


def sharded(rank, world_size, name, dtype):
    model = Net(dtype).to(local_device())
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = OPTIMIZERS[name](groups_of(model))
    optimizer = Zero1Optimizer(inner, trainable, dist.group.WORLD, world_size, bucket_bytes=100)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    for number, step in enumerate(batches(dtype, world_size)):
        if number == 1:  # as if the run had been interrupted here
            state = optimizer.state_dict()
            inner = OPTIMIZERS[name](groups_of(model))
            optimizer = Zero1Optimizer(inner, trainable, dist.group.WORLD, world_size, bucket_bytes=100)
            optimizer.load_state_dict(state)
            schedule.optimizer = inner
        optimizer.reducer.begin()
        model(step[rank].to(local_device())).backward()
        optimizer.reducer.finish()
        optimizer.step()
        schedule.step()
        optimizer.reducer.close()
    memory = sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim
    )
    return {key: value.cpu() for key, value in model.state_dict().items()}, memory


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in OPTIMIZERS),
        *(pytest.param(name, "neuron", marks=[] if name == "AdamW" else pytest.mark.full) for name in OPTIMIZERS),
    ],
)
def test_an_optimizer_that_is_cut_takes_the_steps_of_the_whole_one(name, device):
    expected, _ = whole(name, torch.float64, 3)
    for weights, _ in run_ranks(sharded, 3, name, torch.float64, device=device, environment=FLOAT64):
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-12)


def test_optimizer_states_take_one_part_in_ranks_of_the_memory():
    element = 8 * 2  # AdamW keeps two moments
    trained = 7 * 5 + 5 + 5 * 3 + 3
    for _, memory in run_ranks(sharded, 2, "AdamW", torch.float64, environment=FLOAT64):
        assert abs(memory - element * trained / 2) <= element * 8  # one element of padding a bucket, at most 8 buckets


def test_how_much_an_optimizer_must_see_is_found_by_trying():
    net = Net(torch.float32)
    for name, make in OPTIMIZERS.items():
        expected = Granularity.PARAMETER if name in WHOLE else Granularity.ELEMENT
        assert granularity_of(make(groups_of(net))) is expected, name
    matrices = [net.first.weight, net.second.weight]
    assert granularity_of(torch.optim.Muon(matrices)) is Granularity.PARAMETER
    assert granularity_of(Normalized(net.parameters())) is Granularity.MODEL
    assert granularity_of(torch.optim.LBFGS(net.parameters())) is Granularity.MODEL
    assert granularity_of(torch.optim.AdamW(net.parameters(), lr=0.0)) is Granularity.ELEMENT


def masters(rank, world_size):
    """A bfloat16 model, whose weights are too coarse for its steps, and one whose weights someone else writes."""
    model = Net(torch.bfloat16).to(local_device())
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = Zero1Optimizer(torch.optim.SGD(groups_of(model), lr=1e-4), trainable, dist.group.WORLD, world_size)
    start = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    for _ in range(50):
        optimizer.reducer.begin()
        for _ in range(2):
            with optimizer.reducer.no_sync():
                model.first.bias.sum().mul(2**-9).backward()
        assert model.first.bias.grad.dtype == torch.float32
        model.first.bias.sum().backward()
        optimizer.reducer.finish()
        gradients = [grad for span, grad in optimizer.reducer.gradients.items() if span.name == "first.bias"]
        assert all(torch.equal(grad.cpu(), torch.full_like(grad.cpu(), 1 + 2**-8)) for grad in gradients)
        optimizer.step()
    assert all(part.dtype == torch.float32 for part in optimizer.parts.values())
    moved = (start["first.bias"].float() - model.first.bias.detach().float()).cpu()
    state = optimizer.state_dict()
    assert len(state["masters"]) == len(optimizer.parts)

    with torch.no_grad():
        model.first.bias.fill_(1.0)
    optimizer.reducer.begin()
    model.first.bias.sum().backward()
    optimizer.reducer.finish()
    optimizer.step()
    written = model.first.bias.detach().cpu()
    optimizer.load_state_dict(state)
    state["spans"] = state["spans"][1:]
    with pytest.raises(CheckpointError, match="another data-parallel layout"):
        optimizer.load_state_dict(state)
    return moved, written


@pytest.mark.parametrize("device", DEVICES)
def test_a_bfloat16_model_has_float32_master_weights_and_gradients(device):
    for moved, written in run_ranks(masters, 2, device=device):
        # A single step of 1e-4 is less than half the distance of two bfloat16 numbers near a weight of 0.1 or more.
        torch.testing.assert_close(moved, torch.full_like(moved, 50 * 1e-4 * (1 + 2**-8)), atol=1e-3, rtol=0)
        torch.testing.assert_close(written, torch.ones_like(written))


def refused(rank, world_size):
    model = Net(torch.float32)
    with pytest.raises(ValueError, match=r"Normalized can't be sharded.*Set zero_1=False"):
        Zero1Optimizer(Normalized(model.parameters()), dict(model.named_parameters()), dist.group.WORLD, world_size)


def test_an_optimizer_that_needs_all_parameters_is_refused_by_name():
    run_ranks(refused, 2, device="cpu")
