"""Stochastic rounding: a value that the type can't hold becomes one of its neighbours, and itself in expectation."""

import json
import os
import subprocess
import sys

import pytest
import torch

from optimum_trn.device.build import load_extension

NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture
def stochastic():
    extension = load_extension()
    extension.set_stochastic_rounding(True, 7)
    yield extension
    extension.set_stochastic_rounding(False)


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_the_documented_sum_of_halves(enabled):
    # NeuronCores' documentation: 1024 plus 2048 times 0.5 in float16 stays 1024 when rounded to nearest, and comes
    # to about 2048 when rounded stochastically (their example prints 2056).
    script = (
        "import torch, optimum_trn, json\n"
        "x = torch.tensor(1024.0, dtype=torch.float16, device='neuron')\n"
        "for _ in range(2048): x = x + 0.5\n"
        "print(json.dumps([x.item(), optimum_trn.device.build.load_extension().rounds_stochastically()]))"
    )
    environment = {**os.environ, "NEURON_RT_STOCHASTIC_ROUNDING_EN": enabled, "OPTIMUM_TRN_DEVICE": "neuron"}
    output = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert output.returncode == 0, output.stderr
    total, rounds = json.loads(output.stdout.splitlines()[-1])
    assert rounds == (enabled == "1")
    assert total == 1024 if enabled == "0" else abs(total - 2048) < 120  # four standard deviations


@pytest.mark.parametrize("dtype", NARROW)
def test_down_casts_are_unbiased_and_give_neighbours(stochastic, dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [torch.randn(64, generator=generator), torch.randn(64, generator=generator) * 1e-6, torch.zeros(1)]
    )
    wide = values.repeat(4000, 1)
    rounded = wide.to("neuron").to(dtype).cpu()
    exact = values.to(dtype)
    step = (torch.nextafter(exact, torch.full_like(exact, torch.inf)).float() - exact.float()).abs() * 2
    assert ((rounded.float() - wide).abs() <= step).all()
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= 5 * step.double() / 4000**0.5).all(), "the mean is not the value"
    assert len({tuple(row) for row in rounded[:10].float().tolist()}) == 10, "the noise repeats"


def test_what_the_type_holds_is_not_rounded(stochastic):
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, 65504.0], device="neuron")
    for dtype in NARROW:
        assert torch.equal(special[:-1].to(dtype).float(), special[:-1])
    assert torch.equal(special.to(torch.float16).float(), special)
    assert torch.tensor([torch.nan], device="neuron").to(torch.bfloat16).isnan().all()
    labels = torch.tensor([-100, 0, 1, 32003], device="neuron")
    assert torch.equal(labels.to(torch.int32).to(torch.int64), labels)
    assert torch.equal((labels > 0) & torch.tensor(True, device="neuron"), labels > 0)
    # Exact in bfloat16, so that moving, comparing and negating keep every bit.
    tensor = torch.arange(256, dtype=torch.bfloat16, device="neuron")
    assert torch.equal(tensor.flip(0).sort().values, tensor) and torch.equal(tensor.neg().neg(), tensor)


@pytest.mark.parametrize("dtype", NARROW)
def test_updates_below_half_a_step_add_up(stochastic, dtype):
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        for optimizer_class, each in ((torch.optim.SGD, 1e-5), (torch.optim.AdamW, 1e-5)):
            parameter = torch.nn.Parameter(torch.ones(4000, dtype=dtype, device="neuron"))
            settings = {"weight_decay": 0.0} if optimizer_class is torch.optim.AdamW else {}
            optimizer = optimizer_class([parameter], lr=each, **options, **settings)
            for _ in range(100):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            moved = 1 - parameter.detach().float().mean().item()
            assert moved == pytest.approx(100 * each, rel=0.35), (optimizer_class, options)


def test_products_are_rounded_from_float32_and_promotion_is_not_rounded(stochastic):
    a = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    b = torch.randn(16, 4, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    exact = a.float() @ b.float()
    mean = torch.stack([(a.to("neuron") @ b.to("neuron")).float().cpu() for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=2e-3, atol=2e-3)
    promoted = a.to("neuron") + torch.full((16,), 2.0**-12, device="neuron")
    assert promoted.dtype == torch.float32 and torch.equal(promoted.cpu(), a.float() + 2.0**-12)
    scaled = torch.ones(2000, dtype=torch.bfloat16, device="neuron") * torch.tensor(1 + 2.0**-9, device="neuron")
    assert scaled.dtype == torch.bfloat16 and len(scaled.unique()) == 2


def test_a_seed_gives_the_same_roundings_and_autograd_works(stochastic):
    def step():
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 16).to("neuron", torch.bfloat16)
        stochastic.set_stochastic_rounding(True, 3)
        torch.nn.functional.gelu(layer(torch.ones(4, 16, dtype=torch.bfloat16, device="neuron"))).sum().backward()
        return layer.weight.grad

    first = step()
    assert first.dtype == torch.bfloat16 and torch.equal(first, step())


def test_off_is_the_rounding_of_the_cpu():
    assert not load_extension().rounds_stochastically()
    values = torch.randn(1000)
    assert torch.equal(values.to("neuron").to(torch.bfloat16).cpu(), values.to(torch.bfloat16))
