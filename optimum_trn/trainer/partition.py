"""MiCS in a Trainer: the size of the groups, and a transformers model sharded over them before anything trains it."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers.utils import logging

from ..device.runtime import instance, logical_core_size
from ..errors import MeshError, PlanError
from ..parallel import ParallelConfig
from ..parallel.mics import is_partitioned, partition, smallest_partition
from ..parallel.topology import Topology
from ..patching import state_of
from ..patching.adapters import adapter_parameters, has_adapters

logger = logging.get_logger(__name__)


def resolved(config: ParallelConfig, model: nn.Module | None, world_size: int) -> ParallelConfig:
    """`config` with a number in the place of an "auto" partition size: the smallest whose cores have room for `model`.

    Raises `MeshError` if there is no model to measure, or if it fits on no number of cores.
    """
    if config.mics_partition_size != "auto":
        return config
    if model is None:
        raise MeshError('mics_partition_size="auto" needs to see the model: give model, not model_init, or a number.')
    whole = state_of(model) is None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters = -(-parameters // config.tensor_parallel_size) if whole else parameters
    hbm = instance().chip.hbm_bytes_per_core(logical_core_size())
    copies = config.data_parallel_size(world_size)
    size = smallest_partition(parameters, copies, hbm, config.context_parallel_size)
    logger.info(f"MiCS: {parameters:,} parameters on each tensor-parallel rank, sharded over groups of {size}")
    return replace(config, mics_partition_size=size)


def partition_model(model: Any, mesh: DeviceMesh, topology: Topology, device: torch.device) -> None:
    """Move a patched model to the device, make it equal on all ranks with the same weights, and shard it over a group.

    What adapters of PEFT add stays whole, as at any other layout.  `PlanError` for adapters of embeddings: PEFT saves
    these layers, too, which no rank has.
    """
    if is_partitioned(model):
        return
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    if has_adapters(model) and any(hasattr(layer, "base_layer") for layer in embeddings):
        raise PlanError(
            "mics_partition_size shards the embeddings, which PEFT saves beside adapters of them. Leave them out of "
            "target_modules, or name them in modules_to_save."
        )
    model.to(device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, group=mesh.get_group("dp_cp"), group_src=0)
    name = type(model).__name__
    partition(model, mesh, layers_of(model), topology, adapter_parameters(model))
    # FSDP2 gives the instance a class of its own, by whose name transformers would not know it.
    model._get_name = functools.partial(str, name)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def layers_of(model: Any) -> list[nn.Module]:
    """The blocks that transformers would not split over devices, but for those that share weights with the rest."""
    blocks = set(model._no_split_modules or ())
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    layers = []
    for block in (module for module in model.modules() if type(module).__name__ in blocks):
        own = Counter(id(parameter) for module in block.modules() for parameter in module._parameters.values())
        if all(count == owners[parameter] for parameter, count in own.items() if parameter != id(None)):
            layers.append(block)
    return layers
