"""Experts that are shared out among ranks train as in one process, and move as many bytes as the routing says."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.modeling import NeuronModelForCausalLM
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.expert_parallel import _Exchange, _exchanged
from optimum_trn.parallel.topology import Topology
from optimum_trn.parallel.traffic import Traffic
from optimum_trn.patching import patch_model, pipeline_of
from optimum_trn.trainer import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.trainer.replication import Replication
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import tiny_class
from tests.models.tiny import KeepFloat64, batch
from tests.trainer import scenario
from tests.trainer.stepwise import prove, train
from tests.trainer.test_parity import assert_same

PP2 = dict(pipeline_parallel_size=2)


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_mixtral_trains_as_in_one_process(device):
    """Accumulation of 2, clipping, unequal token counts; the gradients are compared, too."""
    prove(2, "mixtral", dict(expert_parallel_size=2, zero_1=False), device)


def test_two_replicas_of_the_experts_with_a_sharded_optimizer_train_as_in_one_process():
    prove(4, "qwen3_moe", dict(expert_parallel_size=2), steps=2)


def test_experts_and_stages_shared_out_together_train_as_in_one_process():
    """The experts of a stage compute for both pipelines."""
    prove(4, "mixtral", dict(expert_parallel_size=2, **PP2, zero_1=False), steps=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "world_size, model_type, degrees",
    [
        # The group of the experts spans tensor-, data- and context-parallel ranks.
        (2, "mixtral_aux", dict(expert_parallel_size=2, tensor_parallel_size=2)),
        (4, "qwen3_moe", dict(expert_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
        (4, "olmoe", dict(expert_parallel_size=4, tensor_parallel_size=2, zero_1=False)),
        (4, "deepseek_v3", dict(expert_parallel_size=4, tensor_parallel_size=2)),
        (4, "mixtral", dict(expert_parallel_size=4, zero_1=False)),
        (4, "gpt_oss", dict(expert_parallel_size=4, context_parallel_size=2, zero_1=False)),
        (4, "olmoe", dict(expert_parallel_size=2, **PP2, tensor_parallel_size=2, zero_1=False)),
        # The first layer of deepseek, which is a stage, has no experts.
        (4, "deepseek_v3", dict(expert_parallel_size=2, **PP2)),
        (4, "mixtral", dict(expert_parallel_size=2, **PP2, pipeline_schedule="interleaved_1f1b")),
        (4, "qwen3_moe", dict(expert_parallel_size=2, **PP2, pipeline_schedule="zero_bubble")),
        (8, "mixtral", dict(expert_parallel_size=2, **PP2)),
        (8, "qwen3_moe", dict(expert_parallel_size=4, **PP2, tensor_parallel_size=2)),
    ],
)
def test_experts_with_the_other_ways_to_share_a_model_train_as_in_one_process(world_size, model_type, degrees):
    overrides = dict(output_router_logits=True) if model_type.endswith("_aux") else {}
    if degrees.get("pipeline_schedule") == "interleaved_1f1b":
        overrides = dict(num_hidden_layers=4)
    prove(world_size, model_type.removesuffix("_aux"), degrees, **overrides)


def lossy(ctx, *grads):
    return _exchanged(0.99 * grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def uncounted(self, gradients):
    return []


def planted(rank, world_size, error):
    owner, name, wrong = {
        "gradients of travelling tokens": (_Exchange, "backward", staticmethod(lossy)),
        "experts in the norm": (Replication, "_of_experts", uncounted),
    }[error]
    stock = owner.__dict__[name]
    setattr(owner, name, wrong)
    try:
        return train(rank, world_size, "mixtral", dict(expert_parallel_size=2, zero_1=False), {}, 1)
    finally:
        setattr(owner, name, stock)


@pytest.mark.parametrize("error", ["gradients of travelling tokens", "experts in the norm"])
def test_a_planted_error_shows(error):
    for worst in run_ranks(planted, 2, error, device="cpu", environment=FLOAT64):
        assert max(worst.values()) > 1e-6, worst


def routed(rank, world_size):
    """The bytes of all-to-all that arrive here in one pass, and what the routing says."""
    model = tiny_class("mixtral", "causal")
    rows = batch(model, rows=2 * world_size, length=9)
    patch_model(model, ParallelConfig(expert_parallel_size=world_size))
    model.to(local_device()).train()
    choices = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: choices.append(output[2].cpu()))
    own = {name: tensor.chunk(world_size)[rank].to(local_device()) for name, tensor in rows.items()}
    with KeepFloat64(), Traffic(Topology((0,) * world_size, cores_per_chip=world_size)) as traffic:
        model(**own).loss.backward()
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, choices)
    experts = model.config.num_local_experts // world_size
    away = sum(((chosen // experts) != rank).sum().item() for chosen in choices)
    here = sum(
        ((chosen // experts) == rank).sum().item()
        for other, layers in enumerate(of_ranks)
        if other != rank
        for chosen in layers
    )
    counts = len(choices) * (world_size - 1) * experts * 8
    arrived = sum(size for (name, _), size in traffic.received.items() if name == "alltoall_base_")
    assert min(away, here) > 0
    return arrived - counts, 2 * (away + here) * model.config.hidden_size * 8


def test_the_bytes_that_travel_are_those_of_the_routed_tokens():
    """Each choice of an expert elsewhere goes there and back, and its gradient, too; none is dropped."""
    for arrived, expected in run_ranks(routed, 2, device="cpu", environment=FLOAT64):
        assert arrived == expected


def files(rank, world_size, source, target):
    config = ParallelConfig(expert_parallel_size=2, pipeline_parallel_size=world_size // 2)
    model = NeuronModelForCausalLM.from_pretrained(source, config)
    held = next(p for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj"))
    assert len(held) == model.config.num_local_experts // 2
    model.save_pretrained(target)
    ids = torch.arange(3, 12)[None].to(local_device())
    run = model if world_size == 2 else lambda **rows: SimpleNamespace(**pipeline_of(model).evaluate(rows))
    return run(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_reads_its_own_experts_only_and_files_are_stock(tmp_path, ranks):
    stock = tiny_class("mixtral", "causal", torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    ids = torch.arange(3, 12)[None]
    expected = stock(input_ids=ids, labels=ids).loss.item()
    losses = run_ranks(files, ranks, str(tmp_path / "stock"), str(tmp_path / "ours"), device="cpu")
    assert losses == pytest.approx([expected] * ranks, rel=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in stock.state_dict().items())


def refusals(rank, world_size):
    with pytest.raises(PlanError, match="has no experts"):
        patch_model(tiny_class("llama", "causal"), ParallelConfig(expert_parallel_size=2))
    with pytest.raises(PlanError, match="does not divide the 3 experts"):
        patch_model(tiny_class("mixtral", "causal", num_local_experts=3), ParallelConfig(expert_parallel_size=2))
    with pytest.raises(MeshError, match="does not divide the 2 ranks"):
        ParallelConfig(expert_parallel_size=3).build_mesh()


def test_what_experts_cannot_do_is_refused():
    run_ranks(refusals, 2, device="cpu")
    with pytest.raises(MeshError, match="must be a multiple of tensor_parallel_size 2"):
        ParallelConfig(tensor_parallel_size=2, expert_parallel_size=3)


def mixtral():
    return tiny_class("mixtral", "causal", torch.float32, vocab_size=scenario.VOCABULARY)


def trained(rank, world_size, directory, options):
    torch.manual_seed(rank)
    options = dict(num_train_epochs=1, evaluate_first=False, train_sampling_strategy="sequential", **options)
    return scenario.run(NeuronTrainer, NeuronTrainingArguments, directory, model=mixtral(), **options)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_a_user_of_the_trainer_sees_is_what_one_process_shows(tmp_path, stages):
    stock = scenario.run(
        Trainer,
        TrainingArguments,
        str(tmp_path / "stock"),
        model=mixtral(),
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
        evaluate_first=False,
        train_sampling_strategy="sequential",
        wrap_rows=3,  # data-parallel ranks fill the last batch up with the first rows
    )
    options = dict(expert_parallel_size=2, pipeline_parallel_size=stages)
    for result in run_ranks(trained, 2 * stages, str(tmp_path / "ours"), options):
        assert_same(result, stock)
    ours, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / which / "result").state_dict() for which in ("ours", "stock")
    )
    for name, weight in expected.items():
        off = (ours[name] - weight).abs() > 1e-5 + 1e-5 * weight.abs()
        assert off.float().mean() < 1e-3, name
