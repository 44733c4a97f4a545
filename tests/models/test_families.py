"""Every class of every family with a plan, patched, is its stock self: loss, all gradients, their norm, all outputs."""

import copy

import pytest
import torch

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.families import VARIANTS, class_batch, families, tiny_class
from tests.models.proof import proof, proofs

EXACT = 1e-9
# Every class at tensor parallel 2 on the CPU, and the main one at any layout, are proven in test_layouts.py.
WIDER = [pytest.param("neuron", 2, marks=pytest.mark.full), pytest.param("cpu", 4, marks=pytest.mark.full)]
LAYOUTS = [pytest.param("cpu", 2), *WIDER]


def check(result, name):
    assert result["error"] < EXACT, (name, result)
    assert not result["control"] <= 1e-4, f"{name}: a part whose partial sum was lost did not change any output"
    assert result["sharded"] < 0.8, f"{name}: hardly anything is sharded"


@pytest.mark.parametrize("device, tensor_parallel_size", WIDER)
@pytest.mark.parametrize("model_type", families())
def test_every_class_of_a_family_equals_its_stock_self(model_type, device, tensor_parallel_size):
    for results in run_ranks(
        proofs, tensor_parallel_size, model_type, tensor_parallel_size, device=device, environment=FLOAT64
    ):
        controls = [result["control"] for result in results.values()]
        assert any(control > 0 for control in controls), f"{model_type} has no negative control"
        for kind, result in results.items():
            check(result, f"{model_type} {kind}")


def norms_of_stablelm(rank, world_size):
    with pytest.raises(PlanError, match="q_layernorm.norms.0.weight' .* does not say what it is for"):
        proof(rank, world_size, "stablelm", "causal", world_size, qk_layernorm=True)


def test_norms_that_are_one_module_for_each_head_are_refused_by_name():
    run_ranks(norms_of_stablelm, 2, device="cpu")


def cross_attention_of_gpt_bigcode(rank, world_size):
    stock = tiny_class("gpt_bigcode", "causal", torch.float32, add_cross_attention=True, multi_query=False)
    inputs = class_batch(stock, "causal")
    patched = copy.deepcopy(stock)
    patch_model(patched, ParallelConfig(world_size))
    for model in (stock, patched):
        with pytest.raises(RuntimeError, match="split_with_sizes expects split_sizes to sum exactly to 128"):
            model(**inputs)
    del inputs["encoder_hidden_states"]
    torch.testing.assert_close(patched(**inputs).loss, stock(**inputs).loss)


def test_the_cross_attention_of_gpt_bigcode_fails_as_the_stock_one_does():
    """Which splits keys from values by the width of one head."""
    run_ranks(cross_attention_of_gpt_bigcode, 2, device="cpu")


def logits_in_training(rank, world_size, model_type, kind):
    model = tiny_class(model_type, kind, torch.float32)
    inputs = class_batch(model, kind)
    patch_model(model, ParallelConfig(world_size))
    return model.train()(**inputs).logits is None


@pytest.mark.parametrize(
    "model_type, kind, local",
    [("gpt2", "causal", True), ("modernbert", "masked", True), ("bert", "masked", False), ("t5", "seq2seq", False)],
)
def test_logits_stay_local_where_a_class_computes_its_loss_by_the_function_of_the_instance(model_type, kind, local):
    assert run_ranks(logits_in_training, 2, model_type, kind, device="cpu") == [local] * 2


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
