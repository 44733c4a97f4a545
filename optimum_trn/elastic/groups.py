"""The process groups of one generation: all ranks, this rank's pipeline, and for gradients those that share layers."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from optimum_trn.elastic.assignment import Assignment
from optimum_trn.parallel.mesh import RankGroup

RENDEZVOUS_SECONDS = 3.0
"""How long ranks look for each other: all have just said that they are there, so who is not found has been lost."""


class Groups:
    """Made anew in every generation; `gradients` are the sets of ranks that have the same parameters, by their names.

    Every rank of a set has the same names in the same order, and all ranks go through the sets in the same order.
    """

    def __init__(
        self, store: Any, assignment: Assignment, rank: int, sharing: Mapping[str, Sequence[int]], timeout: timedelta
    ) -> None:
        self.assignment = assignment
        self.rank = rank
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=len(assignment.members) * assignment.devices,
            timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        )
        # All ranks make all groups in one order: torch names a group after how many this process has made before.
        for pipeline in range(len(assignment.pipelines)):
            ranks = assignment.ranks(pipeline)
            group = self._group(ranks, timeout)
            if rank in ranks:
                self.pipeline = RankGroup(group)
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, holders in sharing.items():
            sets.setdefault(tuple(sorted(holders)), []).append(name)
        self.gradients: list[tuple[list[str], dist.ProcessGroup]] = []
        for same, names in sets.items():
            if len(same) > 1:
                group = self._group(same, timeout)
                if rank in same:
                    self.gradients.append((names, group))
        _set_pg_timeout(timeout)

    def _group(self, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
        if self.rank in ranks:
            _set_pg_timeout(timeout, group)
        return group

    @torch.no_grad()
    def sum_gradients(self, parameters: Mapping[str, nn.Parameter], contributes: Mapping[str, bool]) -> None:
        """Sum gradients over the pipelines; a rank that does not contribute holds what another of its pipeline does."""
        for names, group in self.gradients:
            by_dtype: dict[torch.dtype, list[str]] = {}
            for name in names:
                by_dtype.setdefault(parameters[name].dtype, []).append(name)
            for same in by_dtype.values():
                flat = torch.cat([_flat_gradient(parameters[name], contributes[name]) for name in same])
                dist.all_reduce(flat, group=group)
                sizes = [parameters[name].numel() for name in same]
                for name, part in zip(same, flat.split(sizes), strict=True):
                    parameters[name].grad = part.view_as(parameters[name])


def _flat_gradient(parameter: nn.Parameter, contributes: bool) -> Tensor:
    if parameter.grad is None or not contributes:
        return torch.zeros_like(parameter).flatten()
    return parameter.grad.flatten()


def leave_groups() -> None:
    """Close all connections at once, so that ranks that wait for this one hear of it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
