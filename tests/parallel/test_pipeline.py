"""A model over a pipeline does what one process does, on every schedule."""

from contextlib import nullcontext

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.schedules import in_flight_bound
from optimum_trn.patching import patch_model, pipeline_of, state_of
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
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
