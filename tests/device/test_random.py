"""Random operators draw from the core's own generator of 16 bytes, and from nothing else."""

import pytest
import torch

import optimum_trn  # noqa: F401

DRAWS = {
    "normal_": lambda n: torch.empty(n, device="neuron").normal_(),
    "uniform_": lambda n: torch.empty(n, device="neuron").uniform_(),
    "bernoulli_": lambda n: torch.empty(n, device="neuron").bernoulli_(0.3),
    "exponential_": lambda n: torch.empty(n, device="neuron").exponential_(),
    "randn": lambda n: torch.randn(n, device="neuron"),
    "rand_like": lambda n: torch.rand_like(torch.empty(n, device="neuron")),
    "randint": lambda n: torch.randint(0, 1000, (n,), device="neuron"),
    "randperm": lambda n: torch.randperm(n, device="neuron"),
    "dropout": lambda n: torch.nn.functional.dropout(torch.ones(n, device="neuron"), 0.3),
    "multinomial": lambda n: torch.multinomial(torch.ones(10, device="neuron"), n, replacement=True),
    "trunc_normal_": lambda n: torch.nn.init.trunc_normal_(torch.empty(n, device="neuron")),
}


@pytest.mark.parametrize("name", DRAWS)
def test_same_seed_same_numbers_and_the_next_draw_differs(name):
    torch.neuron.manual_seed(7)
    first, second = DRAWS[name](1000), DRAWS[name](1000)
    torch.neuron.manual_seed(7)
    assert torch.equal(first.cpu(), DRAWS[name](1000).cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    torch.neuron.manual_seed(8)
    assert not torch.equal(first.cpu(), DRAWS[name](1000).cpu())


@pytest.mark.parametrize("name", DRAWS)
def test_the_cpu_generator_is_neither_read_nor_moved(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.neuron.manual_seed(3)
    first = DRAWS[name](64).cpu()
    assert torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(torch.Generator().manual_seed(99).get_state())
    torch.neuron.manual_seed(3)
    assert torch.equal(first, DRAWS[name](64).cpu())


def test_moments():
    torch.neuron.manual_seed(0)
    n = 200_000
    normal, uniform = torch.randn(n, device="neuron").cpu(), torch.rand(n, device="neuron").cpu()
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs(uniform.mean() - 0.5) < 0.005 and abs(uniform.var() - 1 / 12) < 0.002
    # Successive operators must be independent of each other too, not only the numbers of one.
    first, second = torch.randn(n, device="neuron").cpu(), torch.randn(n, device="neuron").cpu()
    assert abs((first * second).mean()) < 0.01
    heads = torch.cat([torch.rand(4, device="neuron") for _ in range(5000)]).cpu()
    assert abs(heads.mean() - 0.5) < 0.01


def test_state_is_seed_and_offset():
    torch.neuron.manual_seed(0x1234)
    state = torch.neuron.get_rng_state()
    assert state.dtype == torch.uint8 and state.shape == (16,) and state.device.type == "cpu"
    assert state.view(torch.int64).tolist() == [0x1234, 0]
    torch.rand(3, device="neuron")
    moved = torch.neuron.get_rng_state()
    assert moved.view(torch.int64)[0] == 0x1234 and moved.view(torch.int64)[1] > 0
    following = torch.rand(3, device="neuron").cpu()
    torch.neuron.set_rng_state(moved)
    assert torch.equal(following, torch.rand(3, device="neuron").cpu())
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.neuron.set_rng_state(torch.get_rng_state())


def test_each_core_has_its_own_generator():
    torch.neuron.manual_seed_all(5)
    torch.neuron.set_rng_state(torch.tensor([9, 0]).view(torch.uint8), "neuron:1")
    assert torch.neuron.get_rng_state("neuron:0").view(torch.int64).tolist() == [5, 0]
    one = torch.rand(5, device="neuron:1").cpu()
    assert torch.neuron.get_rng_state("neuron:0").view(torch.int64).tolist() == [5, 0]
    torch.neuron.manual_seed_all(9)
    assert torch.equal(one, torch.rand(5, device="neuron:0").cpu())


def test_torch_manual_seed_and_fork_rng():
    torch.manual_seed(11)
    first = torch.rand(5, device="neuron").cpu()
    torch.manual_seed(11)
    with torch.random.fork_rng(device_type="neuron"):
        torch.rand(100, device="neuron")
    assert torch.equal(first, torch.rand(5, device="neuron").cpu())


def test_explicit_generators():
    generator = torch.Generator(device="neuron").manual_seed(4)
    first = torch.rand(8, device="neuron", generator=generator).cpu()
    assert torch.equal(first, torch.rand(8, device="neuron", generator=generator.manual_seed(4)).cpu())
    clone = generator.clone_state() if hasattr(generator, "clone_state") else generator
    assert clone.device.type == "neuron"
    with pytest.raises(RuntimeError, match="Expected a 'neuron' device type for generator"):
        torch.rand(3, device="neuron", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        torch.rand(3, generator=generator)


def test_dropout_in_training_scales_and_in_checkpointed_recomputation_repeats():
    x = torch.ones(10_000, device="neuron")
    dropped = torch.nn.functional.dropout(x, 0.25).cpu()
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((dropped != 0).float().mean() - 0.75) < 0.02

    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64)).to("neuron")
    gradients = []
    for checkpointed in (False, True):
        torch.neuron.manual_seed(1)
        layer.zero_grad()
        x = torch.linspace(-1, 1, 64 * 8, device="neuron").view(8, 64)
        run = (lambda y: torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)) if checkpointed else layer
        run(x).square().sum().backward()
        gradients.append(layer[0].weight.grad.cpu())
    assert torch.equal(*gradients)
