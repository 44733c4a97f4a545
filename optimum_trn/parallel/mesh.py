"""The degrees of parallelism, and the device mesh that they make of a world of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate.state import PartialState
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from optimum_trn.errors import MeshError
from optimum_trn.parallel.collectives import copy_to_group, reduce_from_group

DATA_AXIS = "dp"
TENSOR_AXIS = "tp"


@dataclass(frozen=True)
class ParallelConfig:
    """The degrees of parallelism; data parallel is what is left of the world size.

    With `sequence_parallel`, the tensor-parallel ranks also share the activations between sharded blocks, each holding
    a run of the sequence.  Raises `MeshError` when a degree is not a positive integer.
    """

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"tensor_parallel_size must be a positive integer, not {size!r}.")
        if self.sequence_parallel and size == 1:
            raise MeshError(
                "sequence_parallel=True shares the activations among the tensor-parallel ranks, of which there is one. "
                "Set tensor_parallel_size above 1, or leave sequence_parallel off."
            )

    def data_parallel_size(self, world_size: int) -> int:
        """How many copies of the model `world_size` ranks hold; `MeshError` if the degrees do not divide it."""
        if world_size % self.tensor_parallel_size:
            legal = [size for size in range(1, world_size + 1) if world_size % size == 0]
            alone = " accelerate launch starts one process unless OPTIMUM_TRN_AUTOLOAD=1 shows it the simulated cores."
            raise MeshError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not divide the world size {world_size}. "
                f"Start a multiple of {self.tensor_parallel_size} processes, or choose one of {legal}."
                f"{alone if world_size == 1 else ''}"
            )
        return world_size // self.tensor_parallel_size

    def build_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh with axes ("dp", "tp") over all ranks, or None in a single process without a process group.

        Joins the process group that torchrun or accelerate launch has prepared, if nothing has joined it yet.

        Tensor parallel is the inner axis, so that its ranks are neighbours: its collectives sit on the critical path
        of every layer and belong on the fastest links.  `device_type` defaults to the device of this process.
        """
        if device_type is None:
            from optimum_trn.device import device_type as local_device_type

            device_type = local_device_type()
        data_parallel_size = self.data_parallel_size(world_size())
        if not dist.is_initialized():
            if world_size() == 1:
                return None
            # A script may load its model before anything else has joined the launched processes: join them here, the
            # way the Trainer's accelerator does, which then finds the group that it would have made.
            PartialState(cpu=device_type == "cpu")
        return init_device_mesh(
            device_type, (data_parallel_size, self.tensor_parallel_size), mesh_dim_names=(DATA_AXIS, TENSOR_AXIS)
        )


def world_size() -> int:
    """The number of processes, known from the launcher before any process group exists."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


class RankGroup:
    """A process group that a module may hold: deep copies share it, and a pickle finds it again by its name.

    `torch.distributed.ProcessGroup` itself can be neither copied nor pickled, and would make the same of every model
    whose layers keep one.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)

    def enter(self, tensor: Tensor) -> Tensor:
        """What a sharded block reads, which all ranks hold: its gradient is the sum of their partial ones."""
        return copy_to_group(tensor, self.process_group)

    def leave(self, tensor: Tensor) -> Tensor:
        """What a sharded block gives: the sum of the ranks' partial results, on all of them."""
        return reduce_from_group(tensor, self.process_group)

    def parameter(self, parameter: Tensor) -> Tensor:
        """A whole parameter that is used after a block has been left."""
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_by_name, (self.process_group.group_name,)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def _group_by_name(name: GroupName) -> RankGroup:
    """The group of that name in this process, which must have built the same mesh before it unpickles a model."""
    return RankGroup(_resolve_process_group(name))
