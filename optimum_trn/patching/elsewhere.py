"""What stands in a stage for the modules of other stages: it holds no tensors, and lets the stock forward run on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from optimum_trn.errors import PlanError

Side = Literal["before", "after"]


@dataclass
class Passage:
    """One pass of a stage through the stock forward: where it is, and what it takes over and hands on."""

    received: Any = None
    encoded: Any = None
    sent: Any = None
    phase: Literal["idle", "before", "layers", "after"] = "idle"

    def start(self, received: Any, encoded: Any) -> None:
        """Begins a pass with what the last layer, and the encoder, of the stages before have given."""
        self.received, self.encoded, self.sent, self.phase = received, encoded, None, "before"

    def stop(self) -> None:
        """Lets go of all tensors."""
        self.received, self.encoded, self.sent, self.phase = None, None, None, "idle"

    def require_running(self) -> None:
        """Raises `PlanError` unless a pipeline runs the stage."""
        if self.phase == "idle":
            raise PlanError(
                "This rank has only a stage of the model, which the others must run with it. Train and evaluate "
                "it with NeuronTrainer, or by `step` and `evaluate` of pipeline_of(model), called on all ranks."
            )


class Elsewhere(nn.Module):
    """A module whose weights are on other ranks; `stock` is the module itself, on the meta device and not a child."""

    stock: nn.Module
    passage: Passage

    def __init__(self, stock: nn.Module, passage: Passage) -> None:
        super().__init__()
        self.__dict__["stock"] = stock
        self.__dict__["passage"] = passage

    def __getattr__(self, name: str) -> Any:
        # Stock forwards read attributes of their layers, such as the type of its attention.
        if "stock" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["stock"], name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # A model that changes its dtype has other shapes of dtypes here, too.
        self.stock._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype), recurse)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return type(self.stock).__name__


class PassingLayer(Elsewhere):
    """A layer of another stage: gives what the stage took over, or what its own layers gave."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passage.require_running()
        if self.passage.phase == "before":
            self.passage.phase = "layers"
        if self.passage.phase == "layers":
            return self.passage.received
        return self.passage.sent


class ShapeOnly(Elsewhere):
    """A module before or after all layers, of another stage: gives NaN in the shape of what the stock one gives.

    The stock forward runs on the meta device.  NaN, so that nothing of it can go unnoticed into a result.  Raises
    `PlanError` if it is used on another side of the layers than on `side`.
    """

    side: Side | None

    def __init__(self, stock: nn.Module, passage: Passage, side: Side | None) -> None:
        super().__init__(stock, passage)
        self.__dict__["side"] = side

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passage.require_running()
        if self.side == "before" and self.passage.phase != "before":
            raise PlanError(
                f"{type(self.stock).__name__} counts as before the layers, but is used after or between them. Say so "
                "in `beside_layers` of the plan, or set pipeline_parallel_size=1 for this model."
            )
        if self.side == "after" and self.passage.phase != "after":
            raise PlanError(
                f"{type(self.stock).__name__} counts as after the layers, but is used before or between them. Say so "
                "in `beside_layers` of the plan, or set pipeline_parallel_size=1 for this model."
            )
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.no_grad(), torch.device("meta"):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            shapes = self.stock(*args, **kwargs)
        return tree_map_only(Tensor, lambda shape: _unknown(shape, device), shapes)


class HandOver:
    """A forward hook on the last layer of a stage: what it gives goes to the next stage."""

    def __init__(self, passage: Passage, stage: int, running: Callable[[], int | None]) -> None:
        self.passage = passage
        self.stage = stage
        self.running = running

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running() == self.stage:  # not when the backward pass recomputes it
            self.passage.sent = output
            self.passage.phase = "after"


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module without its data."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _unknown(shape: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if shape.is_floating_point() else 0
    return torch.full((), value, dtype=shape.dtype, device=device).expand(shape.shape)
