"""Feed-forward roles: plain, gated, and gated with one fused projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimum_trn.errors import PlanError
from optimum_trn.patching.blocks.role import enter, leave, parent, require_known, size_of
from optimum_trn.patching.schedule import Selection


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), cut along the intermediate width."""

    gate: str
    up: str
    down: str
    width: str = "intermediate_size"

    @property
    def paths(self) -> tuple[str, ...]:
        return self.gate, self.up, self.down

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.width)

    def record(self, layers: Selection, config: Any) -> None:
        require_known(layers, parent((self.gate, self.up)), self.paths)
        enter(layers, {self.gate: (), self.up: ()})
        leave(layers, self.down)


@dataclass(frozen=True)
class FusedGatedMLP:
    """down(activation(gate) * up), where one linear makes gate and up, one after the other."""

    gate_up: str
    down: str
    width: str = "intermediate_size"

    @property
    def paths(self) -> tuple[str, ...]:
        return self.gate_up, self.down

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.width)

    def record(self, layers: Selection, config: Any) -> None:
        require_known(layers, parent((self.gate_up,)), self.paths)
        widths = {linear.get_parameter("weight").shape[0] for linear in layers[self.gate_up]}
        if len(widths) != 1:
            raise PlanError(f"{layers[self.gate_up].path}: the layers have different widths {sorted(widths)}.")
        enter(layers, {self.gate_up: (widths.pop() // 2,) * 2})
        leave(layers, self.down)


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x))), cut along the intermediate width."""

    up: str
    down: str
    width: str = "intermediate_size"

    @property
    def paths(self) -> tuple[str, ...]:
        return self.up, self.down

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.width)

    def record(self, layers: Selection, config: Any) -> None:
        require_known(layers, parent((self.up,)), self.paths)
        enter(layers, {self.up: ()})
        leave(layers, self.down)
