"""Every seeded fault of a schedule is refused by the checker or caught by verification, which names where it shows."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import reduce_from_group
from optimum_trn.parallel.linear import RowParallelLinear
from optimum_trn.parallel.loss import head_loss
from optimum_trn.patching import Schedule, get_plan, state_of
from optimum_trn.patching.styles import SharedInput, SummedGradients
from optimum_trn.patching.verify import verify
from tests.devices import DEVICES, FLOAT64
from tests.distributed import run_ranks
from tests.models.tiny import batch, tiny_model

TWO = ParallelConfig(tensor_parallel_size=2)
ATTENTION = "model.layers.*.self_attn"
DOWN = "model.layers.*.mlp.down_proj"


def planned(model_type="llama", dtype=torch.float32, **overrides):
    schedule = Schedule(tiny_model(model_type, dtype, num_hidden_layers=1, **overrides), TWO.build_mesh())
    get_plan(model_type).record(schedule)
    return schedule


def without(schedule, *texts):
    """The same schedule without the steps that print as given."""
    kept = [step for step in schedule.journal if str(step) not in texts]
    assert len(kept) == len(schedule.journal) - len(texts)
    return Schedule(schedule.model, schedule.mesh).replay(kept)


def rows_of(schedule):
    return batch(schedule.model, rows=2, length=8)


def right(rank, world_size, model_type, overrides, dtype):
    schedule = planned(model_type, **overrides)
    before = copy.deepcopy(schedule.model.state_dict())
    result = schedule.verify(rows_of(schedule))
    assert result.dtype == dtype and not result.differing
    assert result.gradients.keys() == result.weights.keys() == dict(schedule.model.named_parameters()).keys()
    if dtype == torch.float64:
        assert max(result.loss, *result.gradients.values(), *result.weights.values()) < 1e-12
    assert state_of(schedule.model) is None and schedule.model.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in schedule.model.state_dict().items())
    assert "loss" in str(result)
    schedule.apply()


@pytest.mark.parametrize(
    "model_type, overrides",
    [
        ("qwen3", dict(attention_bias=True, attention_dropout=0.5)),
        ("llama", dict(num_attention_heads=5, num_key_value_heads=1, vocab_size=97, tie_word_embeddings=True)),
    ],
)
def test_a_right_schedule_verifies_to_rounding_and_leaves_the_model_as_it_was(model_type, overrides):
    run_ranks(right, 2, model_type, overrides, torch.float64, device="cpu")


def test_on_a_device_without_float64_float32_has_to_do():
    run_ranks(right, 2, "llama", {}, torch.float32, device="neuron")


def double_shard(schedule):
    schedule[DOWN].shard("weight", 1)


def missing_forward_sync(schedule):
    return without(schedule, f'schedule["{DOWN}"].sync("output", "all_reduce")')


def missing_backward_sync(schedule):
    return without(schedule, f'schedule["{ATTENTION}"].sync("input gradient", "all_reduce")')


def wrong_axis(schedule):
    schedule = without(schedule, f'schedule["{DOWN}"].shard("weight", 1)')
    schedule[DOWN].shard("weight", 0)
    return schedule


def bias_before_the_reduction(schedule):
    schedule[DOWN].shard("bias", 0)
    return schedule


def refused(rank, world_size, fault, reason):
    schedule = planned(attention_bias=True, mlp_bias=True)
    with pytest.raises(PlanError, match=reason):
        fault(schedule).verify(rows_of(schedule))
    assert state_of(schedule.model) is None


@pytest.mark.parametrize(
    "fault, reason",
    [
        (double_shard, "layers.0.mlp.down_proj.weight is sharded already, along dimension 1"),
        (missing_forward_sync, "layers.0.mlp.down_proj: its output is partial .* needs the syncs .* not none"),
        (missing_backward_sync, "layers.0.self_attn.q_proj: its input gradient is partial"),
        (wrong_axis, "layers.0.mlp.down_proj: .* needs the syncs|layers.0.mlp.down_proj: the bias must be sharded"),
        (bias_before_the_reduction, "layers.0.mlp.down_proj: no layer of kind Linear computes with shards"),
    ],
)
def test_faults_that_the_checker_refuses(fault, reason):
    run_ranks(refused, 2, fault, reason, device="cpu")


def unsummed_norm(rank, world_size):
    schedule = planned("qwen3")
    norms = [f'schedule["{ATTENTION}.{name}"].sync("weight gradients", "all_reduce")' for name in ("q_norm", "k_norm")]
    with pytest.raises(PlanError) as error:
        without(schedule, *norms).verify(rows_of(schedule))
    message = str(error.value)
    assert "the gradient of model.layers.0.self_attn.q_norm.weight by" in message and "k_norm" in message
    assert "the loss" not in message, "it shows in gradients only"
    assert "\n" not in message
    return message


def test_an_unsummed_norm_of_the_heads_shows_in_its_gradient_on_all_ranks_alike():
    assert len(set(run_ranks(unsummed_norm, 2, device="cpu"))) == 1


def replicas(rank, world_size):
    schedule = planned(num_attention_heads=4, num_key_value_heads=1)
    with patch("optimum_trn.patching.cutting._replica_group", lambda *args: None), pytest.raises(PlanError) as error:
        schedule.verify(rows_of(schedule))
    message = str(error.value)
    assert "the gradient of model.layers.0.self_attn.k_proj.weight by" in message and "v_proj" in message
    assert "q_proj" not in message and "the loss" not in message


def test_replicas_of_key_value_heads_that_do_not_sum_their_gradients_are_named():
    run_ranks(replicas, 2, device="cpu")


def unmasked(rank, world_size):
    schedule = planned(vocab_size=97)
    loss = "optimum_trn.parallel.loss.head_loss"

    def everything_counts(logits, target, group, vocab_size, ignore_index):
        return head_loss(logits, target, group, logits.shape[-1] * group.size, ignore_index)

    with patch(loss, everything_counts), pytest.raises(PlanError, match="the loss by"):
        schedule.verify(rows_of(schedule))


def test_padding_of_the_vocabulary_that_takes_part_in_the_loss_is_caught():
    run_ranks(unmasked, 2, device="cpu")


def second_line(rank, world_size):
    """What the checker refuses, verification would catch as well."""
    schedule = planned("qwen3", attention_bias=True)
    rows = rows_of(schedule)

    def compare(actions):
        return verify(schedule.model, actions, TWO, schedule.mesh, rows)

    actions = schedule.check()
    with pytest.raises(PlanError, match="the gradient of model.embed_tokens.weight") as error:
        compare([action for action in actions if not isinstance(action.style, SharedInput)])
    assert "the loss" not in str(error.value)
    with pytest.raises(PlanError, match="q_norm"):
        compare([action for action in actions if not isinstance(action.style, SummedGradients)])

    def unreduced(self, input):
        return F.linear(input, self.weight, self.bias)

    with patch.object(RowParallelLinear, "forward", unreduced), pytest.raises(PlanError, match="the loss by"):
        compare(actions)

    def biased_too_early(self, input):
        return reduce_from_group(F.linear(input, self.weight, self.bias), self.group.process_group)

    with patch.object(RowParallelLinear, "forward", biased_too_early), pytest.raises(PlanError, match="the loss by"):
        compare(actions)


@pytest.mark.parametrize("device", DEVICES)
def test_verification_catches_missing_syncs_and_an_early_bias_without_the_checker(device):
    run_ranks(second_line, 2, device=device, environment=FLOAT64)
