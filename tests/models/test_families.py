"""Every class of every family with a plan, patched, is its stock self: loss, all gradients, their norm, all outputs."""

import pytest

from optimum_trn.patching import supported_models
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.families import VARIANTS
from tests.models.proof import proof, proofs

EXACT = 1e-9
LAYOUTS = [
    pytest.param("cpu", 2),
    pytest.param("neuron", 2, marks=pytest.mark.full),
    pytest.param("cpu", 4, marks=pytest.mark.full),
]


def check(result, name):
    assert result["error"] < EXACT, (name, result)
    assert result["control"] > 1e-4, f"{name}: a part whose partial sum was lost did not change any output"
    assert result["sharded"] < 0.8, f"{name}: hardly anything is sharded"


@pytest.mark.parametrize("device, tensor_parallel_size", LAYOUTS)
@pytest.mark.parametrize("model_type", supported_models())
def test_every_class_of_a_family_equals_its_stock_self(model_type, device, tensor_parallel_size):
    for results in run_ranks(
        proofs, tensor_parallel_size, model_type, tensor_parallel_size, device=device, environment=FLOAT64
    ):
        assert results, f"transformers has no class for {model_type}"
        for kind, result in results.items():
            check(result, f"{model_type} {kind}")


@pytest.mark.parametrize("device, tensor_parallel_size", LAYOUTS)
@pytest.mark.parametrize("model_type, variant", [(family, name) for family in VARIANTS for name in VARIANTS[family]])
def test_every_switch_of_a_family_keeps_it_equal(model_type, variant, device, tensor_parallel_size):
    overrides = VARIANTS[model_type][variant]
    for result in run_ranks(
        proof,
        tensor_parallel_size,
        model_type,
        None,
        tensor_parallel_size,
        device=device,
        environment=FLOAT64,
        **overrides,
    ):
        check(result, f"{model_type} {variant}")
