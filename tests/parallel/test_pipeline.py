"""A model over a pipeline does what one process does, on every schedule."""

from contextlib import nullcontext

import pytest
import torch

from optimum_trn import NeuronModelForCausalLM
from optimum_trn.errors import MeshError, PlanError, UnsupportedModelError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.schedules import in_flight_bound
from optimum_trn.patching import Schedule, patch_model, pipeline_of, state_of, unpatch_model
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import class_batch, tiny_class
from tests.models.tiny import KeepFloat64
from tests.trainer.scenario import llama, rows


def batches(count):
    """Micro-batches of two rows with different numbers of labels, the last two shorter."""
    data = rows(2 * count)
    made = []
    for place in range(count):
        batch = {name: torch.stack([row[name] for row in data[2 * place : 2 * place + 2]]) for name in data[0]}
        made.append({name: value[:, : 12 - 3 * (place >= count - 2)] for name, value in batch.items()})
    return made


def train(model, step, steps=2):
    """Losses, gradients and norms of some steps of AdamW, the weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model.train()
    results = []
    for _ in range(steps):
        with KeepFloat64():
            losses = step(model)
        results.append((losses, {name: p.grad.cpu().clone() for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return results, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def alone(config, count):
    model = llama(**config).double()
    data = batches(count)

    def step(model):
        losses = []
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in data)
        for batch in data:
            losses.append(model(**batch, num_items_in_batch=items).loss)
            losses[-1].backward()
        return torch.stack([loss.detach() for loss in losses])

    return train(model, step)


def on_pipeline(rank, world_size, config, count, degrees, options):
    parallel_config = ParallelConfig(**degrees)
    device = local_device()
    model = llama(**config).double()
    patch_model(model, parallel_config, parallel_config.build_mesh(device.type))
    model.to(device)
    if options.get("recompute"):
        context = dict(use_reentrant=False, context_fn=lambda: (nullcontext(), KeepFloat64()))
        model.gradient_checkpointing_enable(context)
    pipeline, state = pipeline_of(model), state_of(model)
    data = [{name: value.to(device) for name, value in batch.items()} for batch in batches(count)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in data)

    def step(model):
        return pipeline.step(data, lambda batch: model(**batch, num_items_in_batch=items).loss).cpu()

    def whole(named):
        return {
            name: unshard_from_group(tensor.to(device), state.placements[name], state.tp_group).cpu()
            for name, tensor in named.items()
        }

    results, weights = train(model, step)
    results = [(losses, whole(gradients)) for losses, gradients in results]
    return results, whole(weights), pipeline.engine.peak_in_flight


CASES = {
    "1f1b": (2, dict(pipeline_parallel_size=2), {}),
    "gpipe": (2, dict(pipeline_parallel_size=2, pipeline_schedule="gpipe"), {}),
    "interleaved": (2, dict(pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b"), {}),
    "zero bubble": (2, dict(pipeline_parallel_size=2, pipeline_schedule="zero_bubble"), {}),
    "recomputed": (2, dict(pipeline_parallel_size=2), dict(recompute=True)),
    "zero bubble, recomputed": (
        2,
        dict(pipeline_parallel_size=2, pipeline_schedule="zero_bubble"),
        dict(recompute=True),
    ),
}
FULL_CASES = {
    "tp2 x pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2), {}),
    "tp2 with sequence parallelism x pp2": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
        {},
    ),
    "tp2 x pp2 interleaved": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b"),
        {},
    ),
    "tp2 x pp2 zero bubble": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, pipeline_schedule="zero_bubble"),
        {},
    ),
    "pp4": (4, dict(pipeline_parallel_size=4), {}),
    "pp4 zero bubble": (4, dict(pipeline_parallel_size=4, pipeline_schedule="zero_bubble"), {}),
}


def compare(name, tied, device="neuron"):
    world_size, degrees, options = {**CASES, **FULL_CASES}[name]
    config = dict(num_hidden_layers=4, tie_word_embeddings=tied)
    expected, weights = alone(config, 5)
    ranks = run_ranks(
        on_pipeline, world_size, config, 5, degrees, options, device=device, environment=FLOAT64, timeout=180
    )
    found = set()
    schedule, size = degrees.get("pipeline_schedule", "1f1b"), degrees["pipeline_parallel_size"]
    for rank, (results, own_weights, peak) in enumerate(ranks):
        for (losses, gradients), (expected_losses, expected_gradients) in zip(results, expected, strict=True):
            torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[_stock(key, tied)], rtol=1e-9, atol=1e-12)
        for key, weight in own_weights.items():
            found.add(_stock(key, tied))
            torch.testing.assert_close(weight, weights[_stock(key, tied)], rtol=1e-9, atol=1e-12)
        assert peak == in_flight_bound(schedule, size, rank * size // world_size, 5)
    assert found == weights.keys()


def _stock(name, tied):
    return "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(name):
    compare(name, tied=name in ("1f1b", "interleaved"))


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FULL_CASES)
def test_more_combinations(name, tied):
    compare(name, tied)


def taken_back(rank, world_size, schedule, tensor_parallel_size):
    """The weights of a model that was cut and made whole again after a change on every stage."""
    device = local_device()
    model = llama(num_hidden_layers=4, tie_word_embeddings=True).to(device)
    config = ParallelConfig(tensor_parallel_size, pipeline_parallel_size=2, pipeline_schedule=schedule)
    patch_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    unpatch_model(model)
    model.tie_weights()
    batch = {name: value.to(device) for name, value in batches(3)[0].items()}
    return {name: value.cpu() for name, value in model.state_dict().items()}, model(**batch).loss.item()


@pytest.mark.parametrize(
    ("world_size", "schedule"), [(2, "1f1b"), pytest.param(4, "interleaved_1f1b", marks=pytest.mark.full)]
)
def test_unpatching_makes_the_model_whole_on_every_rank(world_size, schedule):
    expected = {
        name: 2 * value for name, value in llama(num_hidden_layers=4, tie_word_embeddings=True).state_dict().items()
    }
    for weights, _ in run_ranks(taken_back, world_size, schedule, world_size // 2):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def refusals(rank, world_size):
    """What is said to mistakes, on every rank."""
    mesh = ParallelConfig(pipeline_parallel_size=2).build_mesh()
    said = []

    def expect(error, call):
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))

    expect(PlanError, lambda: NeuronModelForCausalLM.from_config(llama(num_hidden_layers=1).config, CONFIG))
    expect(
        PlanError, lambda: patch_model(llama(), ParallelConfig(pipeline_parallel_size=2, pipeline_schedule=INTERLEAVED))
    )
    expect(MeshError, lambda: ParallelConfig(pipeline_parallel_size=2, pipeline_schedule="2f2b"))
    expect(UnsupportedModelError, lambda: patch_model(tiny_class("albert", "masked"), CONFIG, mesh))
    expect(PlanError, lambda: patch_model(llama(output_hidden_states=True), CONFIG, mesh))
    expect(PlanError, lambda: Schedule(llama(num_hidden_layers=3), mesh)["model.layers.*"].schedule.apply())
    expect(PlanError, lambda: patch_model(tiny_class("t5", "seq2seq"), ZERO_BUBBLE, mesh))
    model = llama()
    patch_model(model, CONFIG, mesh)
    expect(PlanError, lambda: model(**batches(3)[0]))
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    expect(PlanError, lambda: pipeline_of(model).step(batches(3)))
    return said


CONFIG = ParallelConfig(pipeline_parallel_size=2)
ZERO_BUBBLE = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule="zero_bubble")
INTERLEAVED = "interleaved_1f1b"


def test_mistakes_are_refused_with_numbers():
    first, second = run_ranks(refusals, 2, device="cpu")
    assert first == second
    layers, interleaved, schedule, shared, hidden, cuts, split, alone, reentrant = first
    assert "1 layers cannot make 2 pipeline stages" in layers
    assert "2 layers cannot make 4 pipeline stages" in interleaved
    assert "one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, not '2f2b'" in schedule
    assert "albert uses the same weights in several layers" in shared
    assert "output_hidden_states=True asks for a result of every layer" in hidden
    assert "cuts 1 pipeline stages, but pipeline_schedule '1f1b' runs 2 on 2 ranks" in cuts
    assert "'zero_bubble' does not run encoder-decoders such as T5ForConditionalGeneration" in split
    assert "only a stage of the model" in alone
    assert "use_reentrant=True can't be combined with pipeline stages" in reentrant


def chosen_cut(rank, world_size):
    mesh = CONFIG.build_mesh()
    model = llama(num_hidden_layers=4)
    schedule = Schedule(model, mesh, CONFIG)
    schedule["model.layers.0"].cut_pipeline_stage()
    schedule.apply()
    return [name for name, _ in model.named_parameters() if "input_layernorm" in name]


def test_a_schedule_may_say_where_to_cut():
    first, second = run_ranks(chosen_cut, 2, device="cpu")
    assert [len(first), len(second)] == [1, 3]


def translation(seed):
    """A tiny T5 and micro-batches for it."""
    model = tiny_class("t5", "seq2seq")
    return model, [class_batch(model, "seq2seq", rows=3 + place % 2, seed=seed + place) for place in range(3)]


def encoder_decoder(rank, world_size, schedule):
    device = local_device()
    model, data = translation(1)
    config = ParallelConfig(pipeline_parallel_size=2, pipeline_schedule=schedule)
    patch_model(model, config, config.build_mesh(device.type))
    model.to(device)
    data = [{name: value.to(device) for name, value in batch.items()} for batch in data]
    with KeepFloat64():
        losses = pipeline_of(model).step(data)
        outputs = pipeline_of(model).evaluate(data[0])
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return losses.cpu(), outputs["logits"].cpu(), gradients


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", pytest.param("1f1b", marks=pytest.mark.full)])
def test_an_encoder_decoder_with_tied_embeddings_and_shared_position_biases(schedule):
    model, data = translation(1)
    with KeepFloat64():
        losses = torch.stack([model(**batch).loss for batch in data])
        losses.sum().backward()
        logits = model(**data[0]).logits
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    found = set()
    for own_losses, own_logits, own_gradients in run_ranks(encoder_decoder, 2, schedule, environment=FLOAT64):
        torch.testing.assert_close(own_losses, losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(own_logits, logits, rtol=1e-9, atol=1e-12)
        for name, gradient in own_gradients.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)
            found.add(id(model.get_parameter(name)))
    assert found == {id(parameter) for parameter in model.parameters()}
