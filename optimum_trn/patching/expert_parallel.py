"""Expert parallelism of one stock model instance: finds its experts by transformers' marks, leaves each rank a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optimum_trn.errors import PlanError
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.expert_parallel import DistributedExperts
from optimum_trn.parallel.mesh import RankGroup, expert_mesh
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.cutting import replace_data


@dataclass(frozen=True)
class ExpertShards:
    """Where the experts of a patched model are: how each parameter lies on `group`, by name, and who has the same.

    The ranks of `replicas` hold the same experts; they compute with other tokens.
    """

    placements: dict[str, Placement]
    group: RankGroup
    replicas: dist.ProcessGroup


def check_experts(model: nn.Module, size: int) -> None:
    """Raises `PlanError` for a model without experts that one module holds, or with a number that `size` does not
    divide."""
    found = list(_experts(model))
    if not found:
        raise PlanError(
            f"expert_parallel_size {size}: {type(model).__name__} has no experts, or holds them in other ways than "
            "transformers' experts interface does. Leave it at 1."
        )
    for path, module in found:
        number: int = module.num_experts  # type: ignore[assignment]
        if any(len(parameter) != number for parameter in module.parameters()):
            raise PlanError(
                f"{path}: its parameters {[*dict(module.named_parameters())]} do not all have an entry an expert."
            )
        if number % size:
            sizes = [other for other in range(1, number + 1) if number % other == 0]
            raise PlanError(
                f"expert_parallel_size {size} does not divide the {number} experts of {path}: choose one of {sizes}."
            )


def place_experts(model: nn.Module, mesh: DeviceMesh, size: int) -> ExpertShards:
    """Where the experts of a whole model are to be, those of all pipeline stages: a collective over all ranks."""
    experts = expert_mesh(mesh, size)
    placements = {
        f"{path}.{name}": Placement.split(parameter.shape, size, 0)
        for path, module in _experts(model)
        for name, parameter in module.named_parameters()
    }
    return ExpertShards(placements, RankGroup(experts.get_group("ep")), experts.get_group("replicas"))


def share_experts(model: nn.Module, shards: ExpertShards, tensor_group: RankGroup) -> None:
    """Leaves of the experts here what this rank holds, and lets tokens travel."""
    for path, module in _experts(model):
        for name, parameter in module.named_parameters():
            replace_data(parameter, partial(shards.placements[f"{path}.{name}"].shard, rank=shards.group.rank))
        instance: Any = module
        instance.forward = DistributedExperts(module, shards.group, tensor_group)


def unshare_experts(model: nn.Module, shards: ExpertShards) -> None:
    """Takes back what `share_experts` did, with all current experts of this stage on its ranks: a collective."""
    for path, module in _experts(model):
        for name, parameter in module.named_parameters():
            placement = shards.placements[f"{path}.{name}"]
            replace_data(parameter, partial(unshard_from_group, placement=placement, group=shards.group.process_group))
        del module.forward


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that transformers' `use_experts_implementation` has marked, by path."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "_is_expert_parallel"))
