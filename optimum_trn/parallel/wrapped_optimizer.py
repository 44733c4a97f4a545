"""An optimizer around another one, whose groups and states it shows as its own."""

from typing import Any

import torch


class WrappedOptimizer(torch.optim.Optimizer):
    """Subclasses set `optimizer`, the wrapped one, and do not call `Optimizer.__init__`: groups and states are its."""

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups: what this rank updates."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of what this rank updates."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being built or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)
