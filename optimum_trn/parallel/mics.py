"""MiCS: all states of a model are sharded over small groups of neighbouring ranks, each of which holds a whole copy.

Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (arXiv:2205.00119). Sharding
is FSDP2's on a mesh of replicas and shards. A gradient takes two hops: it is reduce-scattered inside its group after
every micro-batch, and all-reduced over the replicas once for each optimizer step. Parameters that are sharded over
tensor-parallel ranks already are plain tensors, of which each group shards what its ranks have in common. With context
parallelism, the ranks with other tokens of a group's rows are part of it: they compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from optimum_trn.errors import MeshError
from optimum_trn.parallel.grad_norm import Gradient
from optimum_trn.parallel.topology import Topology

STATE_BYTES = 16
"""Bytes of the states of one parameter: in float32 the weight, its gradient and the two moments of Adam."""

WITHOUT_DTENSORS = (torch.optim.Rprop,)
"""Optimizers of torch that work element by element, but with operators that DTensors do not have (`index_put_`)."""

COMPUTE_DTYPE = "_optimum_trn_compute_dtype"
"""The attribute of a partitioned model that says in which dtype its float32 master weights are computed with."""

STATE_SHARE = 0.9
"""The part of a core's HBM that states may take; the rest is for activations and buffers."""


def smallest_partition(parameters: int, data_parallel_size: int, hbm_bytes: int, context_parallel_size: int = 1) -> int:
    """The data-parallel ranks of the smallest partition group whose cores can hold the states of `parameters`.

    `parameters` are those that one tensor-parallel rank has; a size divides `data_parallel_size`. One rank is no group,
    and shards nothing. Raises `MeshError` if even all cores together have too little memory.
    """
    sizes = [size for size in range(1, data_parallel_size + 1) if data_parallel_size % size == 0]
    for size in sizes:
        cores = size * context_parallel_size if size > 1 else 1
        if parameters * STATE_BYTES / cores <= STATE_SHARE * hbm_bytes:
            return size
    all_cores = data_parallel_size * context_parallel_size if data_parallel_size > 1 else 1
    raise MeshError(
        f"The states of {parameters:,} parameters take {parameters * STATE_BYTES / 2**30:.1f} GiB, of which each of "
        f"{all_cores} cores with other data would hold "
        f"{parameters * STATE_BYTES / all_cores / 2**30:.1f} GiB: more than {STATE_SHARE:.0%} of its "
        f"{hbm_bytes / 2**30:g} GiB. Launch more processes, or raise tensor_parallel_size."
    )


def partition(
    model: nn.Module,
    mesh: DeviceMesh,
    layers: Sequence[nn.Module],
    topology: Topology,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Shard the parameters of `model` over "dp_shard" and "cp", in place, but for the `ignored` ones.

    Those of each of `layers` are gathered together, and so is the rest.

    `model` is on its device, with equal weights on all data- and context-parallel ranks. Parameters become DTensors;
    those in bfloat16 or float16 are kept in float32, as master weights, and are gathered and computed with as they
    were, while their gradients are reduced in float32. Where the ranks of a group are on several nodes, gathers are
    hierarchical.
    """
    whole = set(ignored)
    parameters = [parameter for parameter in model.parameters() if parameter not in whole]
    dtypes = {parameter.dtype for parameter in parameters}
    is_trained = any(parameter.requires_grad for parameter in parameters)
    policy = MixedPrecisionPolicy()
    if is_trained and (dtypes <= {torch.bfloat16} or dtypes <= {torch.float16}):
        setattr(model, COMPUTE_DTYPE, dtypes.pop())
        policy = MixedPrecisionPolicy(param_dtype=dtype_of(model), reduce_dtype=torch.float32)
        for parameter in parameters:
            parameter.data = parameter.data.float()
    shards = mesh["dp_shard"] if mesh["cp"].size() == 1 else mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    replicas = mesh["dp_replicate"]
    over = DeviceMesh._concatenate([replicas, shards]) if replicas.size() > 1 else shards
    for module in [*reversed(layers), model]:
        # The root, too: who reads or replaces its parameters between steps must find the sharded ones.
        fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=True, ignored_params=whole)
    ranks = dist.get_process_group_ranks(shards.get_group())
    nodes = [topology.nodes[rank] for rank in ranks]
    per_node = nodes.count(nodes[0])
    if 1 < per_node < len(ranks) and nodes == [
        nodes[n] for n in range(0, len(ranks), per_node) for _ in range(per_node)
    ]:
        gather = HierarchicalAllGather(shards, per_node)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(cast(Any, gather))


class HierarchicalAllGather:
    """An all-gather over ranks on several nodes, in which each chunk crosses to another node once.

    Ranks with the same place on their node gather across the nodes first, then each node gathers among its own ranks.
    With `per_node` of p ranks on each node and M bytes in all, (p - per_node) M / p bytes arrive at a node's network
    interface, where a ring over all ranks takes (p - 1) M / p. FSDP2 takes it for `set_custom_all_gather`.
    """

    def __init__(self, mesh: DeviceMesh, per_node: int) -> None:
        nodes = mesh._unflatten(0, (mesh.size() // per_node, per_node), ("across", "within"))
        self.across, self.within = nodes.get_group("across"), nodes.get_group("within")

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input or output of a gather, when FSDP2 asks."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather `input_tensor` of all ranks into `output_tensor`, in rank order; done on return."""
        nodes, ranks = dist.get_world_size(self.across), dist.get_world_size(self.within)
        own_place = input_tensor.new_empty(nodes * input_tensor.numel())
        dist.all_gather_into_tensor(own_place, input_tensor.reshape(-1), group=self.across)
        by_place = input_tensor.new_empty(ranks * own_place.numel())
        dist.all_gather_into_tensor(by_place, own_place, group=self.within)
        in_order = by_place.view(ranks, nodes, -1).transpose(0, 1)
        output_tensor.view(nodes, ranks, -1).copy_(in_order)


@contextmanager
def without_replicas(model: nn.Module) -> Iterator[None]:
    """Inside, gradients take the first hop only: over the group, not over its replicas."""
    cast(FSDPModule, model).set_requires_all_reduce(False)
    try:
        yield
    finally:
        cast(FSDPModule, model).set_requires_all_reduce(True)


def dtype_of(model: Any) -> torch.dtype:
    """In which dtype the model computes, and is saved: that of its parameters, or of which they are master weights."""
    dtype: torch.dtype = getattr(model, COMPUTE_DTYPE, None) or model.dtype
    return dtype


def is_partitioned(model: nn.Module) -> bool:
    """Whether `partition` has sharded the model."""
    return isinstance(model, FSDPModule)


def partitioned(model: nn.Module) -> nn.Module | None:
    """The model within `model` that `partition` has sharded, if there is one: itself, or what PEFT has wrapped."""
    return next((module for module in model.modules() if is_partitioned(module)), None)


def shard_group(model: nn.Module) -> dist.ProcessGroup:
    """The ranks over which `partition` has sharded the parameters of `model`."""
    mesh = next(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return mesh.get_group(mesh.ndim - 1)


def _rows(parameter: DTensor) -> tuple[int, int]:
    """The first row, and how many, of a sharded parameter that this rank has: FSDP2 cuts as torch.chunk does."""
    rows, ranks = parameter.shape[0], parameter.device_mesh.size(-1)
    length = -(-rows // ranks)
    first = min(rows, parameter.device_mesh.get_local_rank(-1) * length)
    return first, min(length, rows - first)


def own_part(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank has of what may be a sharded parameter, and with which element of the whole that begins."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    return tensor.to_local(), _rows(tensor)[0] * (tensor.numel() // max(1, tensor.shape[0]))


def whole(tensor: Tensor) -> Tensor:
    """The whole of what may be a sharded parameter: then a collective over its group."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the model in which master weights have the dtype that the model computes in."""
    dtype = dtype_of(model)
    return {name: tensor.to(dtype) if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def copy_whole(tensor: Tensor, values: Tensor) -> None:
    """Overwrite what may be a sharded parameter with its part of whole values."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(values.narrow(0, *_rows(tensor)))
    else:
        tensor.copy_(values)


def partitioned_gradients(named_parameters: Iterable[tuple[str, Tensor]]) -> list[Gradient]:
    """This rank's parts of the gradients of sharded parameters: runs of their rows."""
    found = []
    for name, parameter in named_parameters:
        if isinstance(parameter.grad, DTensor):
            start = _rows(cast(DTensor, parameter))[0] * (parameter.numel() // parameter.shape[0])
            found.append(Gradient(name, parameter.grad.to_local(), tuple(parameter.shape), start))
    return found


def local_states(states: Any) -> Any:
    """A state dict with this rank's parts in the place of sharded tensors."""
    if isinstance(states, DTensor):
        return states.to_local()
    if isinstance(states, dict):
        return {key: local_states(value) for key, value in states.items()}
    if isinstance(states, list | tuple):
        return type(states)(local_states(value) for value in states)
    return states


def sharded_states(states: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `local_states` made of the state dict of `optimizer`, with sharded tensors again, as its parameters lie."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    restored = {}
    for index, state in states["state"].items():
        like = parameters[index]
        restored[index] = {
            key: DTensor.from_local(
                value.to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
            if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.to_local().shape
            else value
            for key, value in state.items()
        }
    return {**states, "state": restored}
