"""A schedule is checked as a whole before anything changes; what it records can be printed, replayed and applied."""

import copy

import pytest
import torch

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import Schedule, get_plan, patch_model, state_of
from tests.distributed import run_ranks
from tests.models.tiny import batch, tiny_model

TWO = ParallelConfig(tensor_parallel_size=2)
ATTENTION = "model.layers.*.self_attn"


def planned(model_type="qwen3", **overrides):
    """A schedule of a family's plan, recorded and not applied."""
    schedule = Schedule(tiny_model(model_type, torch.float32, **overrides), TWO.build_mesh())
    get_plan(model_type).record(schedule)
    return schedule


def without(schedule, *texts):
    """The same schedule without the steps that print as given."""
    kept = [step for step in schedule.journal if str(step) not in texts]
    assert len(kept) == len(schedule.journal) - len(texts)
    return Schedule(schedule.model, schedule.mesh).replay(kept)


def recorded(rank, world_size):
    schedule = planned(attention_bias=True)
    text = str(schedule)
    assert f'schedule["{ATTENTION}"].sync("input gradient", "all_reduce")' in text
    assert f'schedule["{ATTENTION}.q_proj"].shard("bias", 0)' in text
    assert f'schedule["{ATTENTION}.q_norm"].sync("weight gradients", "all_reduce")' in text
    assert 'schedule["model.layers.*.mlp.down_proj"].shard("weight", 1)' in text

    twin = copy.deepcopy(schedule.model)
    before = copy.deepcopy(twin.state_dict())
    replayed = Schedule(twin, schedule.mesh).replay(schedule.journal)
    assert str(replayed) == text
    assert state_of(twin) is None and all(torch.equal(before[name], t) for name, t in twin.state_dict().items())
    rows = batch(twin)
    report = replayed.apply()
    assert report == patch_model(schedule.model, TWO)
    assert torch.equal(twin.train()(**rows).loss, schedule.model.train()(**rows).loss)
    with pytest.raises(PlanError, match="patched already"):
        replayed.apply()


def test_the_journal_prints_replays_and_equals_what_patching_does():
    run_ranks(recorded, 2, device="cpu")


def faults(rank, world_size):
    schedule = planned(attention_bias=True)
    q = schedule[f"{ATTENTION}.q_proj"]
    with pytest.raises(PlanError, match="layers.0.self_attn.q_proj.weight is sharded already, along dimension 0"):
        q.shard("weight", 0)
    with pytest.raises(PlanError, match="no parameter 'scale'"):
        q.shard("scale", 0)
    with pytest.raises(PlanError, match=r"no dimension 2: its shape is \(40, 64\)"):
        Schedule(schedule.model, schedule.mesh)[f"{ATTENTION}.o_proj"].shard("weight", 2)
    with pytest.raises(PlanError, match="'model.layers.0.attention', which Qwen3ForCausalLM does not have"):
        schedule["model.layers.*.attention"].sync("output", "all_reduce")
    with pytest.raises(PlanError, match="synced already"):
        schedule[ATTENTION].sync("input gradient", "all_reduce")

    o_proj = f'schedule["{ATTENTION}.o_proj"]'
    with pytest.raises(PlanError, match="o_proj: its output is partial .*needs the syncs .*not none"):
        without(schedule, f'{o_proj}.sync("output", "all_reduce")').check()
    wrong = without(schedule, f'{o_proj}.sync("output", "all_reduce")')
    wrong[f"{ATTENTION}.o_proj"].sync("output", "all_gather")
    with pytest.raises(PlanError, match="o_proj: its output is partial"):
        wrong.check()
    with pytest.raises(PlanError, match="q_proj: its input gradient is partial"):
        without(schedule, f'schedule["{ATTENTION}"].sync("input gradient", "all_reduce")').check()
    twice = without(schedule)
    twice[f"{ATTENTION}.q_proj"].sync("input gradient", "all_reduce")
    with pytest.raises(PlanError, match="q_proj: its input gradient would be summed twice"):
        twice.check()
    with pytest.raises(PlanError, match="q_proj: the bias must be sharded along 0"):
        without(schedule, f'schedule["{ATTENTION}.q_proj"].shard("bias", 0)').check()
    early_bias = without(schedule)
    early_bias[f"{ATTENTION}.o_proj"].shard("bias", 0)
    with pytest.raises(PlanError, match="o_proj: no layer of kind Linear computes with shards"):
        early_bias.check()
    other_axis = without(schedule, f'{o_proj}.shard("weight", 1)', f'{o_proj}.sync("output", "all_reduce")')
    with pytest.raises(PlanError, match="its output stays partitioned, but no row-wise linear"):
        without(
            other_axis,
            'schedule["model.layers.*.mlp.down_proj"].shard("weight", 1)',
            'schedule["model.layers.*.mlp.down_proj"].sync("output", "all_reduce")',
        ).check()
    lonely = Schedule(schedule.model, schedule.mesh)
    lonely["model.layers.*.mlp"].sync("input gradient", "all_reduce")
    with pytest.raises(PlanError, match="nothing in it is sharded column-wise"):
        lonely.check()


def test_shards_and_syncs_that_do_not_belong_together_are_refused_before_anything_changes():
    run_ranks(faults, 2, device="cpu")
