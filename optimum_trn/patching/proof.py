"""Proofs of plans: a tiny random model, sharded over simulated ranks, against its stock self, with all gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optimum_trn.parallel.sharding import Placement
from optimum_trn.parallel.simulated import SimulatedMesh, SimulatedRanks
from optimum_trn.patching.cutting import cut, place_parameters
from optimum_trn.patching.engine import patch_instance
from optimum_trn.patching.plan import ModelPlan, record_head
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.verify import KeepFloat64

TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-3}
"""Largest relative errors that another order of summation explains."""

FLOORS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""A gradient is compared as if its largest entry were at least this fraction of the largest of all gradients."""

SEEN = 10.0
"""How many tolerances a lost partial sum must at least change."""


@dataclass
class Trial:
    """How far a sharded model is from its stock self, in relative errors, and what its gradients tell.

    `partial` are whole parameters whose gradients are right once they are summed over the ranks, `summed_twice` those
    that were summed though each rank had the whole gradient.
    """

    output: float
    gradients: dict[str, float] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    summed_twice: tuple[str, ...] = ()

    def wrong(self, tolerance: float) -> dict[str, float]:
        """The gradients that differ, with their errors."""
        return {name: error for name, error in self.gradients.items() if not error <= tolerance}


class Subject:
    """A tiny model in evaluation mode, with random weights everywhere, and inputs that give it a loss."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
        randomise(model)
        self.dtype = torch.float64
        self.model = model.eval()
        self.inputs: Mapping[str, Any] = inputs
        try:
            self._settle(torch.float64, inputs)
        except Exception:  # some architectures have kernels or casts that know no float64
            self._settle(torch.float32, inputs)

    @property
    def tolerance(self) -> float:
        """The largest relative error that is rounding."""
        return TOLERANCES[self.dtype]

    def _settle(self, dtype: torch.dtype, inputs: Mapping[str, Any]) -> None:
        nn.Module.to(self.model, dtype=dtype)
        self.dtype = dtype
        self.inputs = {name: _cast(value, dtype) for name, value in inputs.items()}
        with torch.no_grad(), self.precision():
            self.model(**copied(self.inputs))  # some change their structure on the first call
        _clear_caches(self.model)
        stock = copy.deepcopy(self.model)
        with self.precision():
            outputs = stock(**copied(self.inputs))
            self.expected = {name: tensor.detach() for name, tensor in tensors(outputs).items()}
            total = objective(outputs)
            total.backward()
        self.gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
        if not all(tensor.isfinite().all() for tensor in self.expected.values() if tensor.dim() == 0):
            raise ValueError("the loss is not finite")
        self.scale = max((grad.abs().max().item() for grad in self.gradients.values() if grad is not None), default=0.0)

    def precision(self) -> Any:
        """The context in which both sides run."""
        return KeepFloat64() if self.dtype == torch.float64 else nullcontext()

    def trial(
        self,
        plan: ModelPlan,
        num_ranks: int = 2,
        gradients: bool = True,
        loses: bool = False,
        head: bool = False,
        train: bool = False,
    ) -> Trial:
        """Applies a plan on `num_ranks` simulated ranks and compares; raises what the plan or the model raises."""
        copies = [copy.deepcopy(self.model) for _ in range(num_ranks)]
        schedule = Schedule(copies[0], SimulatedMesh(num_ranks))  # type: ignore[arg-type]
        plan.record_layers(schedule, "")
        if head:
            record_head(schedule)
        actions = schedule.check()
        placements = place_parameters(copies[0], actions, num_ranks)
        ranks = SimulatedRanks(num_ranks)
        ranks.loses = loses
        for twin, group in zip(copies, ranks.groups(), strict=True):
            cut(twin, actions, placements, group)
            patch_instance(twin, group, actions)

        def step(rank: int) -> dict[str, Tensor]:
            with self.precision(), torch.set_grad_enabled(gradients):
                outputs = copies[rank].train(train)(**copied(self.inputs))
                total = objective(outputs) if gradients else None
                if total is not None:
                    total.backward()
            return {name: tensor.detach() for name, tensor in tensors(outputs).items()}

        every = ranks.run(step)
        output = max(self._outputs_error(outputs) for outputs in every)
        if not gradients:
            return Trial(output)
        return self._with_gradients(output, copies, placements)

    def _outputs_error(self, outputs: Mapping[str, Tensor]) -> float:
        if not outputs.keys() <= self.expected.keys() or not outputs:
            return float("inf")
        return max(relative(tensor, self.expected[name]) for name, tensor in outputs.items())

    def _with_gradients(self, output: float, copies: Sequence[nn.Module], placements: Mapping[str, Placement]) -> Trial:
        trial = Trial(output)
        partial, twice = [], []
        named = [dict(twin.named_parameters()) for twin in copies]
        floor = self.scale * FLOORS[self.dtype]
        for name, expected in self.gradients.items():
            given = [parameters[name].grad for parameters in named]
            placement = placements[name]
            if expected is None:
                trial.gradients[name] = max((0.0 if grad is None else grad.abs().max().item()) for grad in given)
                continue
            local = [
                torch.zeros(placement.local_shape(rank), dtype=expected.dtype) if grad is None else grad
                for rank, grad in enumerate(given)
            ]
            if placement.dim is not None:
                trial.gradients[name] = relative(placement.unshard(local), expected, floor)
                continue
            trial.gradients[name] = error = max(relative(grad, expected, floor) for grad in local)
            if error <= self.tolerance:
                continue
            if relative(sum(local[1:], local[0]), expected, floor) <= self.tolerance:
                partial.append(name)
            elif all(relative(grad / len(local), expected, floor) <= self.tolerance for grad in local):
                twice.append(name)
        trial.partial, trial.summed_twice = tuple(partial), tuple(twice)
        return trial


def tensors(outputs: Any, prefix: str = "") -> dict[str, Tensor]:
    """All floating tensors of a model's outputs by name, without caches and attention weights."""
    found: dict[str, Tensor] = {}
    items = outputs.items() if hasattr(outputs, "items") else enumerate(outputs)
    for name, value in items:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[f"{prefix}{name}"] = value
        elif isinstance(value, (tuple, list)) or (
            hasattr(value, "to_tuple") and "cache" not in type(value).__name__.lower()
        ):
            if "past_key_values" not in str(name) and "attention" not in str(name) and "state" != str(name):
                found |= tensors(value, f"{prefix}{name}.")
    return found


def objective(outputs: Any) -> Tensor:
    """A scalar to which the loss and every entry of the other outputs contribute."""
    total: Any = 0.0
    for name, tensor in tensors(outputs).items():
        if not tensor.requires_grad:
            continue
        generator = torch.Generator().manual_seed(len(name))
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        finite = torch.where(tensor.abs() < 1e30, tensor, torch.zeros_like(tensor))
        total = total + (finite.sum() if name == "loss" else (finite * weights).mean())
    if not isinstance(total, Tensor):
        raise ValueError("no output has a gradient")
    return total


def relative(actual: Tensor, expected: Tensor, floor: float = 1e-6) -> float:
    """The largest difference over the largest entry, or over `floor` if that is more; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    real = expected.abs() < 1e30  # masked logits are minus infinity, or nearly
    if not torch.equal(real, actual.abs() < 1e30):
        return float("inf")
    expected = torch.where(real, expected, 0.0)
    difference = (torch.where(real, actual, 0.0) - expected).abs().max()
    error = (difference / expected.abs().max().clamp(min=max(floor, 1e-30))).item()
    return error if error == error else float("inf")


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random weights of a scale that keeps activations; biases, norms, scales and tables move off their start."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or not parameter.is_floating_point():
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            constant = parameter.numel() > 1 and parameter.std() == 0
            if parameter.dim() < 2 or constant:
                parameter.add_(0.3 * noise)
            elif isinstance(module, nn.modules.conv._ConvNd):
                parameter.copy_(1.4 * noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[0 if isinstance(module, Conv1D) else -1] ** 0.5)


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that a model may change."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in inputs.items()
    }


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _clear_caches(model: nn.Module) -> None:
    """Empties what modules derive from parameters at their full size and keep."""
    for module in model.modules():
        for name, value in _dicts(module):
            if "cache" in name:
                value.clear()


def _dicts(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    return (
        (name, value) for name, value in vars(module).items() if isinstance(value, dict) and not name.startswith("_")
    )
