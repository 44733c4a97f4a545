"""Trains a model at some layout beside its stock twin, step by step, and measures how far they are apart."""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist

from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.mesh import axis_of
from optimum_trn.patching import patch_model, pipeline_of, state_of, unpatch_model
from optimum_trn.trainer.replication import Replication
from tests.devices import FLOAT64, local_device
from tests.distributed import run_ranks
from tests.models.families import tiny_class
from tests.models.parity import relative
from tests.models.tiny import KeepFloat64, batch

EXACT = 1e-9


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train(rank, world_size, model_type, degrees, overrides, steps=3, optimizer=adamw):
    """The largest deviation of each step's loss, norm and gradients, and of the weights, from one process."""
    model = tiny_class(model_type, "causal", **overrides)
    stock = copy.deepcopy(model).train()
    config = ParallelConfig(**degrees)
    patch_model(model, config)
    model.to(local_device()).train()
    state, pipeline = state_of(model), pipeline_of(model)
    copies, row = axis_of(state.mesh, "dp").size(), axis_of(state.mesh, "dp").get_local_rank()
    batches = [batch(stock, rows=4, length=11 + 2 * index, seed=index) for index in range(2)]
    mine = SimpleNamespace(optimizer=optimizer(model.parameters()))
    theirs = optimizer(stock.parameters())
    replication = Replication(state.mesh, config)
    replication.attach([model], [mine], None)
    worst = dict(loss=0.0, norm=0.0, gradients=0.0, weights=0.0)
    with KeepFloat64():
        for _ in range(steps):
            mine.optimizer.zero_grad()
            theirs.zero_grad()
            items = sum((rows["labels"][:, 1:] != -100).sum() for rows in batches)
            own = [
                {name: tensor.chunk(copies)[row].to(local_device()) for name, tensor in rows.items()}
                | {"num_items_in_batch": items.to(local_device())}
                for rows in batches
            ]
            expected, actual = 0.0, torch.zeros((), dtype=torch.float64)
            for rows in batches:
                loss = stock(**rows, num_items_in_batch=items).loss
                loss.backward()
                expected += loss.item()
            if pipeline is not None:
                with replication.no_sync():
                    losses = pipeline.step(own, lambda rows: model(**rows).loss * copies)
                with replication.reduced():
                    actual += losses.sum().cpu() / copies
            for index, rows in enumerate(own if pipeline is None else ()):
                loss = model(**rows).loss
                actual += loss.detach().cpu()
                with replication.reduced() if index else replication.no_sync():
                    (loss * copies).backward()
            dist.all_reduce(actual, group=state.mesh.get_group("dp"))
            expected_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5).item()
            assert expected_norm > 0.5, "clipping is not active"
            norm = replication.clip_grad_norm_(list(model.parameters()), 0.5, 2.0).item()
            worst["loss"] = max(worst["loss"], abs(actual.item() - expected) / expected)
            worst["norm"] = max(worst["norm"], abs(norm - expected_norm) / expected_norm)
            for name, parameter in model.named_parameters():
                if not config.zero_1:
                    whole = unshard_from_group(parameter.grad, state.placements[name], state.group_of(name))
                    worst["gradients"] = max(worst["gradients"], relative(whole, stock.get_parameter(name).grad))
            mine.optimizer.step()
            theirs.step()
    unpatch_model(model)
    for name, parameter in stock.named_parameters():
        worst["weights"] = max(worst["weights"], relative(model.get_parameter(name), parameter))
    return worst


def prove(world_size, model_type, degrees, device="cpu", steps=3, **overrides):
    for worst in run_ranks(
        train, world_size, model_type, degrees, overrides, steps, device=device, environment=FLOAT64
    ):
        assert max(worst.values()) < EXACT, worst
