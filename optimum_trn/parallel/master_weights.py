"""What ZeRO-1 shares out, on one rank: float32 master weights, and optimizer states in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from optimum_trn.parallel.buckets import Span
from optimum_trn.parallel.zero1 import LOW_PRECISION, Zero1Optimizer


class MasterWeights(Zero1Optimizer):
    """Wraps an optimizer, which updates float32 copies of bfloat16 and float16 parameters; the model has them rounded.

    With `memory`, it updates copies of all parameters there, and keeps its states there.

    As at several ranks, gradients accumulate in float32, and what someone else writes to the weights counts. Without a
    process group there is nothing to reduce or gather: `loss.backward()` and `Parameter.grad` are as ever.
    `parameters` are those that the optimizer holds, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        memory: torch.device | None = None,
    ) -> None:
        # Not Zero1Optimizer.__init__, which makes reducers for a process group.
        self.optimizer = optimizer
        self.memory = memory
        self.parameters = dict(parameters)
        self.reducers = []
        self._accumulate_in_float32()
        self._take_parts(Span(name, 0, parameter.numel(), 0, 0) for name, parameter in self.parameters.items())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the master weights with the gradients of the model, and round them into it."""
        if closure is not None:
            raise ValueError(
                f"{type(self.optimizer).__name__} takes no closure with float32 master weights: set zero_1=False, "
                "which has it update the weights of the model themselves."
            )
        gradients = {span: self.parameters[span.name].grad for span in self.parts}
        self._prepare({span: grad for span, grad in gradients.items() if grad is not None})
        self.optimizer.step()
        for span in self.parts:
            if self.has_copy_of(self.parameters[span.name]) and gradients[span] is not None:
                self._values(span).copy_(self.parts[span].view(-1))
        self._versions = self._current_versions()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, or the states of the wrapped optimizer, which say nothing of masters."""
        if "masters" in state_dict:
            super().load_state_dict(state_dict)
        else:
            self.optimizer.load_state_dict(state_dict)


def with_master_weights(
    optimizer: torch.optim.Optimizer, model: nn.Module, memory: torch.device | None = None
) -> torch.optim.Optimizer:
    """The optimizer, wrapped if it holds a parameter in low precision or is to keep its states in `memory`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if memory is None and not any(parameter.dtype in LOW_PRECISION for parameter in held):
        return optimizer
    return MasterWeights(optimizer, {names.get(id(p), f"parameter {n}"): p for n, p in enumerate(held)}, memory)
