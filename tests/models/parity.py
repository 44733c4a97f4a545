"""Trains a patched model and its stock twin on the same batches, on every rank, and measures how far they are apart."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from optimum_trn.parallel import ParallelConfig, Placement, clip_grad_norm_
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import PatchState, patch_model, state_of
from tests.devices import local_device
from tests.models.tiny import KeepFloat64, batch

Batch = dict[str, torch.Tensor]


@dataclass
class Deviation:
    """Largest relative errors of a patched run against a stock one, as one rank sees them."""

    loss: float
    norm: float
    first_gradients: float
    gradients: float
    weights: float
    close_weights: float  # the fraction of weight entries within 1e-5 of the largest weight
    gradients_by_name: dict[str, float] = field(default_factory=dict)
    unequal_replicas: set[str] = field(default_factory=set)  # values that should have the same bits on several ranks


def micro_batches(model: PreTrainedModel, count: int = 2) -> list[Batch]:
    """Different numbers of labels in each, so that an average taken in the wrong place shows."""
    return [batch(model, rows=4, length=10 + 2 * index, seed=index) for index in range(count)]


def stock_step(model: PreTrainedModel, batches: list[Batch], max_norm: float) -> tuple[float, float]:
    """Loss and gradient norm of one accumulated, clipped step in one process."""
    num_items = sum((rows["labels"][:, 1:] != -100).sum() for rows in batches)
    total = 0.0
    for rows in batches:
        loss = model(**rows, num_items_in_batch=num_items).loss
        loss.backward()
        total += loss.item()
    return total, torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


def patched_step(model: torch.nn.Module, batches: list[Batch], max_norm: float) -> tuple[float, float]:
    """The same step on this rank's rows, its shards and its device."""
    stock = model.module if isinstance(model, DistributedDataParallel) else model
    state = state_of(stock)
    copies = dist.get_world_size(state.dp_group)
    device = next(stock.parameters()).device
    num_items = sum((rows["labels"][:, 1:] != -100).sum() for rows in batches).to(device)
    total = torch.zeros((), dtype=torch.float64)
    for index, rows in enumerate(batches):
        mine = {name: tensor.chunk(copies)[state.dp_rank].to(device) for name, tensor in rows.items()}
        wait = isinstance(model, DistributedDataParallel) and index + 1 < len(batches)
        with model.no_sync() if wait else contextlib.nullcontext():
            outputs = model(**mine, num_items_in_batch=num_items)
            assert outputs.logits is None or not state.report.local_logits
            (outputs.loss * copies).backward()
        total += outputs.loss.detach().cpu()
    dist.all_reduce(total, group=state.dp_group)
    norm = clip_grad_norm_(stock.named_parameters(), state.placements, state.tp_group, max_norm)
    return total.item(), norm.item()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest entry, which has a floor: a gradient may be zero in theory."""
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    assert expected.isfinite().all() and actual.isfinite().all()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def deviation(
    model: PreTrainedModel,
    tensor_parallel_size: int,
    *,
    steps: int = 20,
    max_norm: float = 0.5,
    after_patching=lambda model: None,
    sequence_parallel: bool = False,
    eps: float = 1e-8,
    **fields: Any,
) -> Deviation:
    """Trains `model` patched and a copy of it stock; the copy stays on the CPU."""
    reference = copy.deepcopy(model).train()
    batches = micro_batches(model)
    patch_model(model, ParallelConfig(tensor_parallel_size, sequence_parallel=sequence_parallel, **fields))
    model.to(local_device()).train()
    after_patching(model)
    state = state_of(model)
    copies = dist.get_world_size(state.dp_group)
    runner = DistributedDataParallel(model, process_group=state.dp_group) if copies > 1 else model
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=eps)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, eps=eps)
    result = Deviation(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    with KeepFloat64():
        for step in range(steps):
            mine.zero_grad()
            theirs.zero_grad()
            loss, norm = patched_step(runner, batches, max_norm)
            expected_loss, expected_norm = stock_step(reference, batches, max_norm)
            assert math.isfinite(loss) and math.isfinite(expected_loss)  # max() would pass over a nan
            result.loss = max(result.loss, abs(loss - expected_loss) / abs(expected_loss))
            result.norm = max(result.norm, abs(norm - expected_norm) / expected_norm)
            assert step > 0 or expected_norm > max_norm, "clipping is not active"
            for name, expected in reference.named_parameters():
                parameter = model.get_parameter(name)
                grad = unshard_from_group(parameter.grad, state.placements[name], state.tp_group)
                error = relative(grad, expected.grad)
                result.gradients_by_name[name] = max(error, result.gradients_by_name.get(name, 0.0))
            result.gradients = max(result.gradients_by_name.values())
            if step == 0:
                result.first_gradients = result.gradients
            mine.step()
            theirs.step()
    close, entries = 0, 0
    for name, expected in reference.named_parameters():
        parameter = model.get_parameter(name)
        if not replicas_are_bit_equal(parameter, state.placements[name], state):
            result.unequal_replicas.add(name)
        weight = unshard_from_group(parameter.detach(), state.placements[name], state.tp_group).cpu()
        result.weights = max(result.weights, relative(weight, expected))
        close += ((weight - expected).abs() <= 1e-5 * expected.abs().max()).sum().item()
        entries += expected.numel()
    result.close_weights = close / entries
    return result


def replicas_are_bit_equal(parameter: torch.nn.Parameter, placement: Placement, state: PatchState) -> bool:
    """Whether all ranks that hold the same values of a parameter hold the same bits of it and of its gradient.

    Padding counts as values that are the same everywhere: zeros.
    """
    equal = True
    for tensor in (parameter.detach(), parameter.grad):
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(state.dp_group))]
        dist.all_gather(others, tensor.contiguous(), group=state.dp_group)
        equal = equal and all(torch.equal(other, tensor) for other in others)
        others = [torch.empty_like(tensor) for _ in range(placement.num_ranks)]
        dist.all_gather(others, tensor.contiguous(), group=state.tp_group)
        if placement.dim is None:
            equal = equal and all(torch.equal(other, tensor) for other in others)
            continue
        held: dict[int, torch.Tensor] = {}
        for rank, other in enumerate(others):
            for piece, segment in zip(placement.pieces(rank), placement.segments(rank), strict=True):
                values = other.narrow(placement.dim, segment.offset, segment.length)
                if piece.start is None:
                    equal = equal and not values.any()
                else:
                    equal = equal and torch.equal(values, held.setdefault(piece.start, values))
    return equal
