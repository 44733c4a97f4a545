"""Inferred plans: recognised by structure, proven before use, cached, printed as a declaration; else refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MptConfig

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import declaration, infer_plan, patch_model, state_of
from optimum_trn.patching import infer as inference
from optimum_trn.patching.declaration import from_json, to_json
from optimum_trn.patching.plan import ModelPlan, Stack
from optimum_trn.patching.proof import Subject
from optimum_trn.patching.registry import find_plan
from optimum_trn.patching.search import Search
from optimum_trn.patching.shrink import inputs_for, shrunk
from tests.devices import FLOAT64
from tests.distributed import run_ranks
from tests.models.parity import relative
from tests.models.tiny import KeepFloat64, randomise
from tests.models.zoo import zoo_inputs, zoo_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    # Not the environment: worker processes would inherit it, and compile the device anew into that cache.
    monkeypatch.setattr(inference, "cache_directory", lambda: tmp_path / "optimum_trn")
    monkeypatch.setattr(inference, "_proven", {})
    monkeypatch.setattr(inference, "_by_type", {})
    return tmp_path


def llama_plan():
    return infer_plan(AutoConfig.for_model("llama"))


def regions(plan):
    return [region for stack in plan.stacks for region in stack.roles]


def subject_of(model_type, kind="causal"):
    model = zoo_model(model_type, kind)
    return Subject(model, zoo_inputs(model, model_type, kind))


def test_what_is_declared_for_llama_is_inferred_from_its_structure():
    attention, mlp = regions(llama_plan())
    assert set(attention.columns) == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert set(attention.rows) == {"self_attn.o_proj"} and attention.enters == "first"
    assert set(mlp.columns) == {"mlp.gate_proj", "mlp.up_proj"} and set(mlp.rows) == {"mlp.down_proj"}


def test_low_rank_projections_are_known_to_see_the_heads_of_one_rank():
    # They pass the forward proof without; only gradients tell.
    subject = subject_of("deepseek_v3")
    attention = regions(Search(subject).run())[0]
    assert "self_attn.kv_a_proj_with_mqa.weight" in attention.sees
    plan = ModelPlan(
        "deepseek_v3", embedding=(), stacks=(Stack("layers", type(attention)(**{**vars(attention), "sees": ()})),)
    )
    trial = subject.trial(plan)
    assert trial.output <= subject.tolerance
    assert any("kv_a" in name for name in trial.wrong(subject.tolerance)) and any("kv_a" in n for n in trial.partial)


def test_a_cut_in_the_wrong_order_and_one_without_effect_are_not_proven():
    subject = subject_of("gpt2")
    attention = regions(Search(subject).run())[0]
    assert attention.columns == {"attn.c_attn": "blocked"}
    wrong = type(attention)(**{**vars(attention), "columns": {"attn.c_attn": "even"}})
    assert subject.trial(ModelPlan("gpt2", embedding=(), stacks=(Stack("h", wrong),))).output > 1e-3
    with torch.no_grad():
        for layer in subject.model.transformer.h:
            layer.attn.c_proj.weight.zero_()
    subject._settle(torch.float64, subject.inputs)
    search = Search(subject)
    search.run()
    assert any("no effect" in reason for reason in search.unproven.values())


def test_a_plan_is_kept_on_disk_and_is_the_same_again(own_cache, monkeypatch):
    plan = llama_plan()
    assert plan == from_json(to_json(plan))
    assert len(list(own_cache.glob("optimum_trn/plans/llama-*.json"))) == 1
    inference._proven.clear()
    monkeypatch.setattr(inference, "_search", None)  # would be called
    assert llama_plan() == plan


def test_another_structure_is_proven_anew():
    llama_plan()
    infer_plan(AutoConfig.for_model("llama", attention_bias=True))
    infer_plan(AutoConfig.for_model("llama", num_hidden_layers=7))  # the same tiny copy
    assert len(inference._proven) == 2


def test_the_declaration_is_source_that_registers_the_plan():
    plan = llama_plan()
    registered = []
    source = declaration(plan).replace("register_plan(\n", "registered.append(\n")
    exec(source, {"registered": registered})
    assert registered == [plan]


def test_what_cannot_be_proven_is_refused_with_what_did_not_match():
    with pytest.raises(UnsupportedModelError, match="mamba: none of its modules is recognised.*tensor_parallel_size=1"):
        infer_plan(AutoConfig.for_model("mamba"))


def test_sequence_parallelism_is_for_declared_families():
    with pytest.raises(PlanError, match="inferred"):
        llama_plan().record_sequence(None)


def test_shrinking_keeps_the_switches_and_one_layer_of_each_type():
    config = AutoConfig.for_model(
        "qwen2", num_hidden_layers=28, layer_types=["full_attention"] * 27 + ["sliding_attention"]
    )
    tiny = shrunk(config)
    assert tiny.layer_types == ["full_attention", "sliding_attention"] and tiny.num_hidden_layers == 2
    assert tiny.hidden_act == config.hidden_act and tiny.hidden_size < 100


TINY_MPT = dict(d_model=64, n_heads=8, n_layers=3, vocab_size=104, max_seq_len=64)


def compare(rank, world_size, cache):
    """The largest relative error of loss and gradients of a model without a declaration."""
    import copy
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    from optimum_trn.parallel.collectives import unshard_from_group
    from tests.devices import local_device

    assert find_plan("mpt") is None
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(MptConfig(**TINY_MPT)).double()
    randomise(stock, 0)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, ParallelConfig(world_size))
    patched.to(local_device())
    inputs = inputs_for(stock)
    inputs["labels"] = inputs["input_ids"]
    with KeepFloat64():
        expected, loss = stock(**inputs).loss, patched(**{n: v.to(local_device()) for n, v in inputs.items()}).loss
        expected.backward()
        loss.backward()
    errors = [relative(loss, expected)]
    for name, parameter in stock.named_parameters():
        placement = state_of(patched).placements[name]
        whole = unshard_from_group(patched.get_parameter(name).grad, placement, state_of(patched).tp_group)
        errors.append(relative(whole, parameter.grad))
    return max(errors), report.local_parameters / report.total_parameters, str(report)


@pytest.mark.parametrize("device", ["neuron", "cpu"])
def test_a_model_without_a_declaration_is_patched_and_trains_alike(device, tmp_path):
    for error, fraction, _ in run_ranks(compare, 2, str(tmp_path), device=device, environment=FLOAT64):
        assert error < 1e-9
        assert fraction < 0.55


def test_the_report_names_what_stays_whole_and_why():
    subject = subject_of("doge")
    search = Search(subject)
    plan = search.run()
    assert list(plan.unproven) == ["model.layers.*.self_attn"]
    assert all("self_attn" not in path for region in regions(plan) for path in (*region.columns, *region.sums))
