"""The style of a module that holds the weights of all experts of a mixture as three-dimensional parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block, Heads
from optimum_trn.parallel.experts import ADDED_ONCE, ShardedExperts
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.sharding import Placement


@dataclass(frozen=True)
class CutExperts:
    """Every expert cut along its intermediate width: `gate_up_proj` by output features, `down_proj` by input features.

    How the weights lie is read off the marks that transformers' `use_experts_implementation` leaves on the instance:
    `is_transposed` (experts, in, out), `is_concatenated` (all gates, then all ups; interleaved otherwise).
    """

    def placements(self, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
        into = {"gate_up_proj", "up_proj", "gate_up_proj_bias", "up_proj_bias"}
        own = dict(module.named_parameters())
        strange = own.keys() - into - {"down_proj", *ADDED_ONCE}
        if strange or "down_proj" not in own:
            raise PlanError(f"experts of class {type(module).__name__} with parameters {sorted(own)} cannot be cut.")
        transposed = bool(getattr(module, "is_transposed", False))
        placements = {}
        for name, parameter in own.items():
            shape, dim = parameter.shape, parameter.dim() - 1
            if name in ADDED_ONCE:
                placements[name] = Placement.replicate(shape, num_ranks)
            elif name == "down_proj":
                placements[name] = Placement.split(shape, num_ranks, 1 if transposed else 2)
            else:
                dim = 1 if dim == 2 and not transposed else dim
                concatenated = name.startswith("gate") and getattr(module, "is_concatenated", True)
                half = shape[dim] // 2
                # Interleaved, a gate and its up stay together, as the entries of a head do.
                pairs: tuple[Block, ...] = (Heads(half, half, 2),) if name.startswith("gate") else ()
                placements[name] = Placement.split(shape, num_ranks, dim, (half, half) if concatenated else pairs)
        return placements

    def apply(self, module: nn.Module, group: RankGroup) -> None:
        module.forward = ShardedExperts(module, group)

    def revert(self, module: nn.Module) -> None:
        del module.forward
