"""The role of a mixture of experts: the router stays whole, every expert is cut along its intermediate width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimum_trn.patching.blocks.role import Role, Where, size_of
from optimum_trn.patching.expert_styles import CutExperts
from optimum_trn.patching.schedule import Selection


@dataclass(frozen=True)
class Experts:
    """Experts whose weights one module holds, and the `shared` expert that some layers have beside them."""

    experts: str
    shared: Role | None = None
    width: str = "moe_intermediate_size"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.experts,)

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.width)

    def record(self, layers: Selection, config: Any) -> None:
        layers[self.experts].replace(CutExperts())
        if self.shared is not None:
            Where(self.shared).record(layers, config)
