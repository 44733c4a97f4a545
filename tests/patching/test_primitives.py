"""Primitives beside shard and sync: what each changes, that the model computes the same, and that they come off."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import optimum_trn
from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import Schedule, get_plan, unpatch_model
from optimum_trn.patching.marks import annotations_of, stages_of
from tests.devices import DEVICES, FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.tiny import batch, tiny_model

TWO = ParallelConfig(tensor_parallel_size=2)
LAYERS = "model.layers.*"


def planned(**overrides):
    schedule = Schedule(tiny_model("llama", torch.float32, **overrides), TWO.build_mesh())
    get_plan("llama").record(schedule)
    return schedule


def rows_of(schedule):
    rows = batch(schedule.model, rows=2, length=8)
    return {name: tensor.to(local_device()) for name, tensor in rows.items()}


def train_step(schedule):
    schedule.model.to(local_device()).train()(**rows_of(schedule)).loss.backward()


def rms_norm(module, hidden_states):
    return F.rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)


def scaled_norm(module, hidden_states):
    return 1.01 * rms_norm(module, hidden_states)


def dropping_silu(module, hidden_states):
    return F.dropout(F.silu(hidden_states), 0.5, module.training)


class Calls(TorchFunctionMode):
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is self.function
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def replace(rank, world_size):
    schedule = planned()
    schedule[f"{LAYERS}.input_layernorm"].replace(rms_norm)
    assert str(schedule).endswith(f'schedule["{LAYERS}.input_layernorm"].replace({__name__}.rms_norm)')
    schedule.verify(rows_of(schedule))

    wrong = planned()
    wrong[f"{LAYERS}.input_layernorm"].replace(scaled_norm)
    with pytest.raises(PlanError, match="does not compute what the model does"):
        wrong.verify(rows_of(wrong))
    sharded = planned()
    sharded[f"{LAYERS}.mlp.up_proj"].replace(rms_norm)
    with pytest.raises(PlanError, match="up_proj: Replaced would drop what ColumnWise does there"):
        sharded.check()


@pytest.mark.parametrize("device", DEVICES)
def test_replace_computes_a_function_of_the_same_parameters_and_verification_judges_it(device):
    run_ranks(replace, 2, device=device)


def checkpoint(rank, world_size, path, ratio, expected):
    schedule = planned(num_hidden_layers=4)
    schedule[path].checkpoint(ratio)
    schedule.verify(rows_of(schedule))
    schedule.apply()
    calls = [0] * 4
    for index, layer in enumerate(schedule.model.model.layers):
        # The first of each block: recomputation stops when it has all that the backward pass needs.
        projection = layer.self_attn.q_proj if "self_attn" in path else layer.mlp.gate_proj
        projection.register_forward_pre_hook(lambda *args, index=index: calls.__setitem__(index, calls[index] + 1))
    train_step(schedule)
    assert calls == expected
    with torch.no_grad():
        schedule.model(**rows_of(schedule))
    assert calls == [count + 1 for count in expected]
    unpatch_model(schedule.model)
    calls[:] = [0] * 4
    train_step(schedule)
    assert calls == [1] * 4


@pytest.mark.parametrize(
    "path, ratio, expected",
    [
        (LAYERS, 1.0, [2, 2, 2, 2]),
        (LAYERS, 0.5, [2, 2, 1, 1]),
        (f"{LAYERS}.mlp", 0.25, [2, 1, 1, 1]),
        (f"{LAYERS}.self_attn", 0.75, [2, 2, 2, 1]),
    ],
)
def test_checkpoint_recomputes_the_first_of_the_modules_in_the_backward_pass_only(path, ratio, expected):
    run_ranks(checkpoint, 2, path, ratio, expected, device="cpu", environment=FLOAT64)


def fork_rng(rank, world_size):
    schedule = planned()
    schedule[LAYERS].checkpoint()
    schedule[f"{LAYERS}.mlp.act_fn"].replace(dropping_silu).fork_rng()
    schedule.apply()
    masks = []
    for layer in schedule.model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, output: masks.append((output == 0).cpu()))
    torch.manual_seed(7)
    train_step(schedule)
    first, second, *recomputed = masks
    assert 0.3 < first.float().mean() < 0.7 and not torch.equal(first, second)
    assert torch.equal(recomputed[0], second) and torch.equal(recomputed[1], first)
    after = torch.rand(3, device=local_device()).cpu(), torch.rand(3)
    schedule.model.eval()(**rows_of(schedule))
    assert not masks[-1].any()
    return first, after


@pytest.mark.parametrize("device", DEVICES)
def test_fork_rng_draws_other_masks_on_every_rank_the_same_in_recomputation_and_leaves_the_common_stream(device):
    (mine, after), (yours, after_too) = run_ranks(fork_rng, 2, device=device)
    assert not torch.equal(mine, yours)
    assert all(map(torch.equal, after, after_too))


def fuse(rank, world_size, overrides):
    def products(schedule):
        schedule.model.train()
        with Calls(F.linear) as calls:
            schedule.model(**rows_of(schedule))
        return calls.count

    names = list(planned(**overrides).model.state_dict())
    separate = planned(**overrides)
    separate.apply()
    separate.model.to(local_device())
    fused = planned(**overrides)
    fused[f"{LAYERS}.self_attn"].fuse("q_proj", "k_proj", "v_proj")
    fused[f"{LAYERS}.mlp"].fuse("gate_proj", "up_proj")
    assert f'schedule["{LAYERS}.mlp"].fuse("gate_proj", "up_proj")' in str(fused)
    fused.verify(rows_of(fused))
    fused.apply()
    fused.model.to(local_device())
    assert list(fused.model.state_dict()) == names
    assert products(separate) - products(fused) == 2 * (2 + 1)


@pytest.mark.parametrize(
    "overrides", [{}, dict(attention_bias=True, mlp_bias=True, num_attention_heads=4, num_key_value_heads=1)]
)
def test_fuse_makes_one_product_of_several_and_keeps_names_and_shapes(overrides):
    run_ranks(fuse, 2, overrides, device="cpu", environment=FLOAT64)


def decompose(rank, world_size):
    schedule = planned(attention_bias=True, num_hidden_layers=1)
    schedule[f"{LAYERS}.self_attn.o_proj"].decompose()
    schedule[f"{LAYERS}.self_attn.q_proj"].decompose()
    schedule.verify(rows_of(schedule))
    schedule.apply()
    with Operators() as decomposed:
        schedule.model(**rows_of(schedule))
    unpatch_model(schedule.model)
    Schedule(schedule.model, schedule.mesh).replay(
        [step for step in schedule.journal if "decompose" not in str(step)]
    ).apply()
    with Operators() as whole:
        schedule.model(**rows_of(schedule))
    # The row-wise linear adds its bias after the sum of all ranks in any case.
    assert whole.counts["addmm"] - decomposed.counts["addmm"] == 1
    assert decomposed.counts["mm"] - whole.counts["mm"] == 1


def test_decompose_separates_product_and_bias():
    run_ranks(decompose, 2, device="cpu")


def everything(rank, world_size):
    schedule = planned(attention_bias=True, num_hidden_layers=3)
    stock = copy.deepcopy(schedule.model)
    schedule["model.embed_tokens"].annotate("weight", "lr_scale", 0.5).annotate("weight", "tags", ["a"])
    schedule[f"{LAYERS}.post_attention_layernorm"].replace(rms_norm)
    schedule[f"{LAYERS}.mlp"].fuse("gate_proj", "up_proj")
    schedule[f"{LAYERS}.mlp"].checkpoint(0.5)
    schedule[f"{LAYERS}.mlp.act_fn"].fork_rng()
    schedule[f"{LAYERS}.self_attn.v_proj"].decompose()
    schedule["model.layers.0"].cut_pipeline_stage()
    text = str(schedule)
    assert 'schedule["model.embed_tokens"].annotate("weight", "lr_scale", 0.5)' in text
    assert f'schedule["{LAYERS}.mlp"].checkpoint(0.5)' in text
    assert f'schedule["{LAYERS}.mlp.act_fn"].fork_rng()' in text
    assert f'schedule["{LAYERS}.self_attn.v_proj"].decompose()' in text
    assert 'schedule["model.layers.0"].cut_pipeline_stage()' in text

    twin = Schedule(copy.deepcopy(stock), schedule.mesh).replay(schedule.journal)
    assert str(twin) == text
    twin.verify(rows_of(twin))
    assert twin.apply() == schedule.apply()
    model = schedule.model
    assert annotations_of(model) == {"model.embed_tokens.weight": {"lr_scale": 0.5, "tags": ["a"]}}
    assert stages_of(model) == [["model.layers.0"], ["model.layers.1", "model.layers.2"]]
    assert stages_of(stock) == [[]] and annotations_of(stock) == {}

    rows = rows_of(schedule)
    torch.manual_seed(0)
    expected = model.to(local_device()).train()(**rows).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), twin.model.to(local_device()).train()):
        torch.manual_seed(0)
        assert torch.equal(other(**rows).loss, expected)
        assert annotations_of(other) == annotations_of(model)
    unpatch_model(model)
    for mine, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(mine) is type(theirs) and "forward" not in mine.__dict__
        assert mine.__dict__.keys() == theirs.__dict__.keys()
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_all_primitives_together_print_replay_verify_copy_and_come_off(device):
    run_ranks(everything, 2, device=device)


def beside_sequence_parallelism(rank, world_size):
    schedule = planned(attention_bias=True, mlp_bias=True)
    schedule[LAYERS].sequence_parallel()
    schedule[f"{LAYERS}.self_attn"].fuse("q_proj", "k_proj", "v_proj")
    schedule[f"{LAYERS}.mlp.down_proj"].decompose()
    schedule[f"{LAYERS}.input_layernorm"].replace(rms_norm)
    schedule[LAYERS].checkpoint(0.5)
    result = schedule.verify(rows_of(schedule))
    assert max(result.gradients.values()) < 1e-12


def test_primitives_go_together_with_sequence_parallelism():
    run_ranks(beside_sequence_parallelism, 2, device="cpu")


def refusals(rank, world_size):
    schedule = planned()
    with pytest.raises(PlanError, match="above 0 and at most 1, not 1.5"):
        schedule[LAYERS].checkpoint(1.5)
    schedule[LAYERS].checkpoint(0.5)
    with pytest.raises(PlanError, match="layers.0: it is Recomputed already"):
        schedule[LAYERS].checkpoint()
    with pytest.raises(PlanError, match="embed_tokens has no parameter 'bias' to annotate"):
        schedule["model.embed_tokens"].annotate("bias", "key", 1)
    with pytest.raises(PlanError, match="layers.0.mlp has no 'q_proj' to fuse"):
        schedule[f"{LAYERS}.mlp"].fuse("q_proj", "up_proj")
    with pytest.raises(PlanError, match="layers.1 is the last layer"):
        schedule["model.layers.1"].cut_pipeline_stage()
    with pytest.raises(PlanError, match="model.norm is not a layer of a module list"):
        schedule["model.norm"].cut_pipeline_stage()
    with pytest.raises(PlanError, match="'model.layers.0.experts', which LlamaForCausalLM does not have"):
        schedule[f"{LAYERS}.experts"].fork_rng()

    mixed = planned()
    mixed[f"{LAYERS}.mlp"].fuse("gate_proj", "down_proj")
    with pytest.raises(PlanError, match="gate_proj, down_proj are not all cut by output features, or all whole"):
        mixed.check()
    late = planned()
    late[f"{LAYERS}.mlp.act_fn"].fork_rng().replace(dropping_silu)
    with pytest.raises(
        PlanError, match="act_fn: Replaced would drop what RankRandom does there.*record Replaced first"
    ):
        late.check()
    unbiased = planned()
    unbiased[f"{LAYERS}.mlp.up_proj"].decompose()
    with pytest.raises(PlanError, match="up_proj: only a linear with a bias"):
        unbiased.apply()
    twice = planned()
    twice.model.activation_checkpointing_enable()
    twice[LAYERS].checkpoint()
    with pytest.raises(PlanError, match="LlamaDecoderLayer recomputes its activations already"):
        twice.apply()


def test_steps_that_cannot_be_right_are_refused_where_they_are_recorded_or_checked():
    run_ranks(refusals, 2, device="cpu")


def test_the_schedule_is_public():
    assert optimum_trn.Schedule is Schedule
