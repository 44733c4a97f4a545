"""The degrees of parallelism, and the device mesh that they make of a world of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from optimum_trn.errors import MeshError
from optimum_trn.parallel.collectives import copy_to_group, reduce_from_group
from optimum_trn.parallel.schedules import STAGES_PER_RANK, ScheduleName

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of every mesh, outermost first: the further in, the closer together its ranks are (see topology.py)."""

PIPELINE_AXIS = "pp"
DATA_AXIS = "dp"
CONTEXT_AXIS = "cp"
TENSOR_AXIS = "tp"

VIEWS = {DATA_AXIS: ("dp_replicate", "dp_shard"), "dp_cp": ("dp_replicate", "dp_shard", "cp")}
"""Axes that are one group as well: ranks with other rows ("dp"), and with other tokens ("dp_cp")."""

VIEWS_ATTRIBUTE = "_optimum_trn_views"
"""The attribute of a mesh that holds its `VIEWS`: torch is to stop slicing flattened dimensions by name."""

NOT_WITH_MICS = {
    "pipeline_parallel_size": "every micro-batch would gather the weights of a stage and scatter their gradients anew, "
    "which costs the time that the stages save",
    "expert_parallel_size": "its groups shard what their ranks have in common, and each has experts of its own",
}
"""What `mics_partition_size` is refused with, and why."""


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """This rank's part of a mesh along one of `AXES` or `VIEWS`; of another mesh, along its dimension of that name."""
    view: DeviceMesh | None = getattr(mesh, VIEWS_ATTRIBUTE, {}).get(name)
    return mesh[name] if view is None else view


@dataclass(frozen=True)
class ParallelConfig:
    """The degrees of parallelism; data parallel is what is left of the world size.

    With `sequence_parallel`, the tensor-parallel ranks also share the activations between sharded blocks, each holding
    a run of the sequence.  The layers are cut over the pipeline-parallel ranks, which work on the micro-batches of one
    step in the order of `pipeline_schedule`.  The context-parallel ranks hold other tokens of the
    same sequences.  The experts of a mixture are shared out among `expert_parallel_size` neighbours of all ranks that
    have the same layers: a multiple of the tensor-parallel ones, which have the same tokens.  With `zero_1` the
    optimizer is cut over the ranks that hold the same weights; with
    `mics_partition_size` the weights and gradients are, too, over groups of that many data-parallel ranks, with the
    context-parallel ones that have the same rows ("auto": see mics.py).  With `optimizer_offload` its states are in the
    host's memory.  Raises `MeshError` when a degree is not a positive integer.

    `recompute` says what training recomputes in the backward pass instead of keeping it: the layers
    ("full"), the first of them (their ratio, a number of at most 1), or the core of attention ("selective").

    `fuse_qkv` makes queries, keys and values by one product, `fuse_gate_up` gate and up projections of gated MLPs; the
    weights keep their names and shapes.
    """

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    pipeline_schedule: ScheduleName = "1f1b"
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    zero_1: bool = True
    optimizer_offload: bool = False
    mics_partition_size: int | Literal["auto"] | None = None
    recompute: str | float | None = None
    fuse_qkv: bool = False
    fuse_gate_up: bool = False

    def __post_init__(self) -> None:
        _check_recomputation(self.recompute)
        for name, size in self.model_degrees.items():
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"{name} must be a positive integer, not {size!r}.")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise MeshError(
                "sequence_parallel=True shares the activations among the tensor-parallel ranks, of which there is one. "
                "Set tensor_parallel_size above 1, or leave sequence_parallel off."
            )
        self._check_expert_size()
        self._check_offload()
        if self.mics_partition_size is not None and (self.fuse_qkv or self.fuse_gate_up):
            raise MeshError(
                "fuse_qkv and fuse_gate_up keep weights together that mics_partition_size takes apart one by one: "
                "leave one of them out."
            )
        if self.mics_partition_size is not None:
            self._check_partition_size(self.mics_partition_size)
        if self.pipeline_schedule not in STAGES_PER_RANK:
            raise MeshError(
                f"pipeline_schedule must be one of {', '.join(STAGES_PER_RANK)}, not {self.pipeline_schedule!r}."
            )

    def _check_offload(self) -> None:
        if not self.optimizer_offload:
            return
        if not self.zero_1:
            raise MeshError(
                "optimizer_offload=True moves what zero_1 shares out to the memory of the host, and zero_1 is False: "
                "leave zero_1 on."
            )
        if self.mics_partition_size is not None:
            raise MeshError(
                f"optimizer_offload=True can't be combined with mics_partition_size={self.mics_partition_size!r}: the "
                "states follow the weights, which are shards of FSDP2 in the device's memory. Leave one of them out."
            )

    def _check_partition_size(self, size: object) -> None:
        if size != "auto" and (not isinstance(size, int) or size < 1):
            raise MeshError(f'mics_partition_size must be a positive integer or "auto", not {size!r}.')
        for name, reason in NOT_WITH_MICS.items():
            if getattr(self, name) > 1:
                raise MeshError(
                    f"mics_partition_size={size!r} can't be combined with {name}={getattr(self, name)}: {reason}. "
                    "Leave one of them out; zero_1, the default, shards the optimizer in any case."
                )

    @property
    def optimizer_memory(self) -> torch.device | None:
        """Where the optimizer and its states are; None: with the model."""
        return torch.device("cpu") if self.optimizer_offload else None

    @property
    def of_model(self) -> ParallelConfig:
        """Without the fields that say nothing of the model itself: only these must agree with a loaded model's."""
        return replace(self, zero_1=True, optimizer_offload=False, mics_partition_size=None)

    @property
    def model_degrees(self) -> dict[str, int]:
        """The fields whose product is the number of ranks that share one copy of the model."""
        return {
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "tensor_parallel_size": self.tensor_parallel_size,
        }

    @property
    def num_stages(self) -> int:
        """How many stages the layers are cut into; the interleaved schedule has several on each rank."""
        size = self.pipeline_parallel_size
        return size * STAGES_PER_RANK[self.pipeline_schedule] if size > 1 else 1

    @property
    def ranks_per_copy(self) -> int:
        """How many ranks share one copy of the model."""
        return math.prod(self.model_degrees.values())

    @property
    def shares_model(self) -> bool:
        """Whether there is anything of a model that a rank leaves to another."""
        return self.ranks_per_copy > 1 or self.expert_parallel_size > 1

    @property
    def cuts_optimizer(self) -> bool:
        """Whether ranks that see other data have other optimizer states, by ZeRO-1 or by their experts."""
        return self.zero_1 or self.expert_parallel_size > 1

    def data_parallel_size(self, world_size: int) -> int:
        """How many copies of the model `world_size` ranks hold; `MeshError` if the degrees do not divide it."""
        ranks = self.ranks_per_copy
        if world_size % ranks:
            used = {name: size for name, size in self.model_degrees.items() if size > 1}
            legal = [size for size in range(1, world_size + 1) if world_size % size == 0]
            alone = " accelerate launch starts one process unless OPTIMUM_TRN_AUTOLOAD=1 shows it the simulated cores."
            total, choice = (f" = {ranks} ranks", "a product") if len(used) > 1 else ("", "one")
            raise MeshError(
                f"{' x '.join(f'{name} {size}' for name, size in used.items())}{total} does not divide the world size "
                f"{world_size}. Start a multiple of {ranks} processes, or choose {choice} of {legal}."
                f"{alone if world_size == 1 else ''}"
            )
        return world_size // ranks

    def axis_sizes(self, world_size: int) -> dict[str, int]:
        """The number of ranks along each of `AXES`; their product is `world_size`, or `MeshError`.

        An "auto" partition size counts as 1, until somebody who knows the model has replaced it.
        """
        copies, shards = self.data_parallel_size(world_size), self.mics_partition_size
        shards = shards if isinstance(shards, int) else 1
        if copies % shards:
            raise MeshError(
                f"mics_partition_size {shards} does not divide the {copies} data-parallel ranks. Choose one of "
                f"{[size for size in range(1, copies + 1) if copies % size == 0]}."
            )
        sizes = {
            PIPELINE_AXIS: self.pipeline_parallel_size,
            "dp_replicate": copies // shards,
            "dp_shard": shards,
            CONTEXT_AXIS: self.context_parallel_size,
            TENSOR_AXIS: self.tensor_parallel_size,
        }
        ranks = world_size // self.pipeline_parallel_size
        if ranks % self.expert_parallel_size:
            raise MeshError(
                f"expert_parallel_size {self.expert_parallel_size} does not divide the {ranks} ranks that have the "
                f"same layers. Choose one of {[size for size in range(1, ranks + 1) if ranks % size == 0]}."
            )
        return {axis: sizes.get(axis, 1) for axis in AXES}

    def _check_expert_size(self) -> None:
        size = self.expert_parallel_size
        if not isinstance(size, int) or size < 1:
            raise MeshError(f"expert_parallel_size must be a positive integer, not {size!r}.")
        if size == 1:
            return
        if size % self.tensor_parallel_size:
            raise MeshError(
                f"expert_parallel_size {size} must be a multiple of tensor_parallel_size {self.tensor_parallel_size}: "
                "the ranks that have the same tokens hold different experts."
            )

    def build_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh over all ranks with `AXES` and `VIEWS`, or None in a single process without a process group.

        Joins the process group that torchrun or accelerate launch has prepared, if nothing has joined it yet.

        Tensor parallel is the innermost axis, so that its ranks are neighbours: its collectives sit on the critical
        path of every layer and belong on the fastest links.  `device_type` defaults to the device of this process.
        """
        if device_type is None:
            from optimum_trn.device import device_type as local_device_type

            device_type = local_device_type()
        sizes = self.axis_sizes(world_size())
        if not dist.is_initialized():
            if world_size() == 1:
                return None
            # A script may load its model before anything else has joined the launched processes: join them here, the
            # way the Trainer's accelerator does, which then finds the group that it would have made.
            PartialState(cpu=device_type == "cpu")
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
        setattr(mesh, VIEWS_ATTRIBUTE, {view: mesh[axes]._flatten(view) for view, axes in VIEWS.items()})
        return mesh


def _check_recomputation(what: str | float | None) -> None:
    if what in (None, "full", "selective"):
        return
    try:
        ratio = float(what)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise MeshError(
            "recompute is 'full', 'selective', or the ratio of layers to recompute, above 0 and at most "
            f"1; not {what!r}."
        )


def expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Another view of a mesh: the ranks that share out the experts ("ep"), and those with the same ("replicas").

    A collective over all ranks.  The ranks of "ep" are neighbours, the tensor-parallel ones first.
    """
    ranks = mesh.mesh.reshape(mesh.mesh.shape[0], -1, size)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(PIPELINE_AXIS, "replicas", "ep"))


def world_size() -> int:
    """The number of processes, known from the launcher before any process group exists."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def pipeline_size(mesh: DeviceMesh | None) -> int:
    """How many ranks share the layers of one copy of the model; a mesh without that axis has one."""
    has_axis = mesh is not None and PIPELINE_AXIS in (mesh.mesh_dim_names or ())
    return mesh[PIPELINE_AXIS].size() if mesh is not None and has_axis else 1


class RankGroup:
    """A process group that a module may hold: deep copies share it, and a pickle finds it again by its name.

    `torch.distributed.ProcessGroup` itself can be neither copied nor pickled, and would make the same of every model
    whose layers keep one.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)

    def among(self, ranks: Sequence[int]) -> RankGroup:
        """The group of some of the ranks of this one; each of them must call it."""
        world_ranks = [dist.get_global_rank(self.process_group, rank) for rank in ranks]
        return RankGroup(dist.new_group(world_ranks, use_local_synchronization=True))

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
