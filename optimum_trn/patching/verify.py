"""Verification of a schedule: one training step of a scheduled copy of a model, against a copy that is left alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.mesh import ParallelConfig
from optimum_trn.patching.engine import install, uninstall
from optimum_trn.patching.state import PatchState
from optimum_trn.patching.styles import Action

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest differences, in units of the largest entry: what other orders of summation explain, and no fault does."""

FLOOR = 1e-3
"""Tensors are compared as if their largest entry were at least this: gradients may be zero but for rounding."""

SHOWN = 5


class KeepFloat64(TorchFunctionMode):
    """Makes the casts to float32 inside stock models (norms, loss) no-ops for float64, so that rounding is 1e-16 there.

    With them no two computations of the same function would agree to better than 1e-7.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            if torch.float32 in args[1:] or kwargs.get("dtype") == torch.float32:
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        if function in (torch.softmax, F.softmax) and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        if function is F.grid_sample and len(args) > 1 and args[0].dtype == torch.float64:
            args = (args[0], args[1].double(), *args[2:])  # made as float32, beside an input that would be
        return function(*args, **kwargs)


class WithoutDropout(TorchFunctionMode):
    """Makes dropout the identity in a model that trains: masks that differ by rank cannot be compared."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Verification:
    """How far one training step of a scheduled model is from that of the model itself.

    All differences are those of the worst entry on the worst rank, in units of the tensor's largest entry; `gradients`
    and `weights`, which are those after the step, by name of the parameter.
    """

    dtype: torch.dtype
    loss: float
    gradients: dict[str, float]
    weights: dict[str, float]

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as equal."""
        return TOLERANCES[self.dtype]

    @property
    def differing(self) -> dict[str, float]:
        """What is not equal, in the order of the model; a nan is not equal, either."""
        every = {"the loss": self.loss}
        every.update({f"the gradient of {name}": error for name, error in self.gradients.items()})
        every.update({f"the updated {name}": error for name, error in self.weights.items()})
        return {name: error for name, error in every.items() if not error <= self.tolerance}

    def __str__(self) -> str:
        return (
            f"largest relative differences in {str(self.dtype).removeprefix('torch.')}: loss {self.loss:.1e}, "
            f"gradients {max(self.gradients.values()):.1e}, updated weights {max(self.weights.values()):.1e}"
        )


def verify(
    model: PreTrainedModel,
    actions: Sequence[Action],
    parallel_config: ParallelConfig,
    mesh: DeviceMesh,
    batch: Mapping[str, Tensor],
    seed: int = 0,
) -> Verification:
    """Compares loss, every gradient and the weights after one AdamW step of `model` with and without `actions`.

    Both are copies of the model with random numbers added to everything one-dimensional (a missing sync of a bias that
    is zero, or of a norm weight that is one, would not show), in float64 where the device computes in it, in training
    without dropout.  `batch` has labels, or whatever else gives a loss.  The names, shapes and bits of the state dict
    must come back from the scheduled copy, too.  A collective over all ranks, which need memory for two models.

    Raises `PlanError`, on all ranks alike, which names the first parameters that differ.
    """
    device = torch.device(mesh.device_type)  # the current one of its type, which is this process's own
    dtype = torch.float64 if _computes_in_float64(device) else torch.float32
    stock = copy.deepcopy(model).train()
    nn.Module.to(stock, device="cpu", dtype=dtype)
    _randomise_vectors(stock, seed)
    scheduled = copy.deepcopy(stock)
    state = install(scheduled, actions, parallel_config, mesh)
    scheduled.to(device)
    if tuple(dict(scheduled.named_parameters())) != tuple(dict(stock.named_parameters())):
        raise PlanError("The scheduled model has other parameters than the model; names must stay.")
    _require_bits(scheduled, stock, state)

    losses, optimizers = [], []
    for twin, place in ((stock, torch.device("cpu")), (scheduled, device)):
        inputs = {name: value.to(place, dtype if value.is_floating_point() else None) for name, value in batch.items()}
        # Large compared with AdamW's usual 1e-8, which makes whole steps of the rounding of gradients near zero.
        optimizers.append(torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3))
        with KeepFloat64(), WithoutDropout():
            loss = twin(**inputs).loss
            if loss is None:
                raise PlanError(f"The batch of {sorted(batch)} gives no loss to compare. Add labels.")
            # What Tensor.backward does; but that would leave the modes, so that recomputation would not match.
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        losses.append(loss.detach())
    gradients = {
        name: _difference(_whole(_grad(scheduled.get_parameter(name)), name, state), _grad(parameter))
        for name, parameter in stock.named_parameters()
    }
    for optimizer in optimizers:
        optimizer.step()
    weights = {
        name: _difference(_whole(scheduled.get_parameter(name), name, state), parameter)
        for name, parameter in stock.named_parameters()
    }
    uninstall(scheduled)
    _require_names_and_shapes(scheduled, stock)
    result = Verification(dtype, *_worst_of_ranks(_difference(losses[1], losses[0]), gradients, weights, device))
    differing = result.differing
    if differing:
        shown = ", ".join(f"{name} by {error:.1e}" for name, error in list(differing.items())[:SHOWN])
        more = f", and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise PlanError(
            f"The scheduled {type(model).__name__} does not compute what the model does: in {dtype}, relative to the "
            f"largest entry, {shown}{more} ({result.tolerance:.0e} would be rounding). Correct the shards and syncs "
            "around the first of these."
        )
    return result


def _computes_in_float64(device: torch.device) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


@torch.no_grad()
def _randomise_vectors(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _whole(tensor: Tensor, name: str, state: PatchState) -> Tensor:
    return unshard_from_group(tensor, state.placements[name], state.group_of(name))


def _difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=FLOOR)).item()


def _require_bits(scheduled: nn.Module, stock: nn.Module, state: PatchState) -> None:
    """Raises `PlanError` if cutting a parameter and putting it together again does not give the same bits."""
    broken = [
        name
        for name, parameter in stock.named_parameters()
        if not torch.equal(_whole(scheduled.get_parameter(name), name, state).cpu(), parameter)
    ]
    if broken:
        raise PlanError(f"The shards of {', '.join(broken[:SHOWN])} do not make the whole parameter again, bit by bit.")


def _require_names_and_shapes(scheduled: nn.Module, stock: nn.Module) -> None:
    mine, theirs = ({name: tensor.shape for name, tensor in m.state_dict().items()} for m in (scheduled, stock))
    if mine != theirs:
        names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        raise PlanError(f"The state dict of the scheduled model is not that of the model: {', '.join(names[:SHOWN])}.")


def _worst_of_ranks(
    loss: float, gradients: dict[str, float], weights: dict[str, float], device: torch.device
) -> tuple[float, dict[str, float], dict[str, float]]:
    """The same numbers on all ranks, so that none goes on where another one raises."""
    every = torch.tensor([loss, *gradients.values(), *weights.values()], dtype=torch.float32, device=device)
    every.nan_to_num_(nan=float("inf"))  # a maximum may drop a nan
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    worst, *others = every.tolist()
    count = len(gradients)
    return worst, dict(zip(gradients, others, strict=False)), dict(zip(weights, others[count:], strict=True))
