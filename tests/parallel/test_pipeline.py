"""A model over a pipeline does what one process does, on every schedule."""

import pytest
import torch

from optimum_trn.parallel import ParallelConfig
from optimum_trn.patching import patch_model, pipeline_of
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


def on_pipeline(rank, world_size, config, count, degrees):
    parallel_config = ParallelConfig(**degrees)
    device = local_device()
    model = llama(**config).double()
    patch_model(model, parallel_config, parallel_config.build_mesh(device.type))
    model.to(device)
    pipeline = pipeline_of(model)
    data = [{name: value.to(device) for name, value in batch.items()} for batch in batches(count)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in data)

    def step(model):
        return pipeline.step(data, lambda batch: model(**batch, num_items_in_batch=items).loss).cpu()

    results, weights = train(model, step)
    return results, weights, pipeline.engine.peak_in_flight


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"])
def test_two_stages(schedule):
    config = dict(num_hidden_layers=4)
    expected, weights = alone(config, 5)
    ranks = run_ranks(
        on_pipeline, 2, config, 5, dict(pipeline_parallel_size=2, pipeline_schedule=schedule), environment=FLOAT64
    )
    found = set()
    for results, own_weights, _ in ranks:
        for (losses, gradients), (expected_losses, expected_gradients) in zip(results, expected, strict=True):
            torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-12)
        for name, weight in own_weights.items():
            found.add(name)
            torch.testing.assert_close(weight, weights[name], rtol=1e-9, atol=1e-12)
    assert found == weights.keys()
