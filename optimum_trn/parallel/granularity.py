"""What an optimizer must see at once to update a parameter: any part of it, the whole of it, or all of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (7,), 2: (6, 10), 3: (4, 3, 5), 4: (4, 3, 2, 3)}
"""Of the parameters an optimizer is tried on, by dimensions."""


class Granularity(Enum):
    """The smallest part of a model that can be updated without knowing the rest."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"


def with_parameters(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Any:
    """An optimizer of the same class and settings, without state, over other parameters: one list for each group."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}, "params": list(parameters)}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    return twin


def granularity_of(optimizer: torch.optim.Optimizer) -> Granularity:
    """Finds out by trying: small parameters are updated whole, in two parts, and without the others.

    `MODEL` also where the trial fails, as with an optimizer whose step needs a closure.
    """
    dims = [sorted({min(p.ndim, max(SHAPES)) for p in group["params"]}) for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    # Two parameters of each number of dimensions, so that each has another one of its kind.
    start = [[draw(SHAPES[dim]) for dim in group for _ in range(2)] for group in dims]
    grads = [[[draw(tuple(p.shape)) for p in group] for group in start] for _ in range(STEPS)]
    try:
        whole = _updated(optimizer, start, grads)
        alone = _updated(optimizer, _first_of_pairs(start), [_first_of_pairs(step) for step in grads])
    except Exception:
        return Granularity.MODEL
    if not _equal(_first_of_pairs(whole), alone):
        return Granularity.MODEL
    try:
        parts = _updated(optimizer, _cut(start), [_cut(step) for step in grads])
    except Exception:  # such as one that asks for matrices
        return Granularity.PARAMETER
    joined = [[torch.cat(group[n : n + 2]) for n in range(0, len(group), 2)] for group in parts]
    flat = [[p.reshape(-1) for p in group] for group in whole]
    return Granularity.ELEMENT if _equal(flat, joined) else Granularity.PARAMETER


def _first_of_pairs(groups: list[list[Tensor]]) -> list[list[Tensor]]:
    return [group[::2] for group in groups]


def _cut(groups: list[list[Tensor]]) -> list[list[Tensor]]:
    """Every tensor flat, in two parts of different length."""
    return [[part for tensor in group for part in _two_parts(tensor.reshape(-1))] for group in groups]


def _two_parts(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: flat.numel() // 3], flat[flat.numel() // 3 :]


def _updated(
    optimizer: torch.optim.Optimizer, start: list[list[Tensor]], grads: list[list[list[Tensor]]]
) -> list[list[Tensor]]:
    """The parameters after steps with these gradients, at a learning rate that shows."""
    parameters = [[nn.Parameter(tensor.clone()) for tensor in group] for group in start]
    twin = with_parameters(optimizer, parameters)
    for group in twin.param_groups:
        if group.get("lr") is not None:
            group["lr"] = 0.1
    for step in grads:
        for group, group_grads in zip(parameters, step, strict=True):
            for parameter, grad in zip(group, group_grads, strict=True):
                parameter.grad = grad.clone()
        type(twin).step(twin)  # not the instance's, which a scheduler may have wrapped
    return [[parameter.detach() for parameter in group] for group in parameters]


def _equal(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> bool:
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
