"""The training state beside the weights in a checkpoint: optimizer shards, device generators, completeness."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..errors import CheckpointError
from ..parallel.mics import local_states, sharded_states

logger = logging.get_logger(__name__)


AXES = {
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dp_shard": "mics_partition_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
"""The axes along which optimizer states are cut, each under the name by which a user knows it."""

Layout = tuple[tuple[str, int], ...]
"""The axes along which the optimizer states of a checkpoint are cut, with the number of ranks on each."""


def layout_of(mesh: DeviceMesh | None, zero_1: bool) -> Layout:
    """How this run cuts its optimizer states; empty if every rank has them all."""
    if mesh is None:
        return ()
    sizes = {axis: mesh[axis].size() for axis in AXES if axis in ("tp", "dp") or axis in (mesh.mesh_dim_names or ())}
    if not zero_1 or sizes.get("dp_shard", 1) > 1:
        sizes["dp"] = sizes["cp"] = 1
    return tuple((axis, size) for axis, size in sizes.items() if size > 1)


def optimizer_file(layout: Layout, ranks: Mapping[str, int]) -> str:
    """The file of the optimizer states of the rank with these places along the axes of `layout`."""
    return f"optimizer_{'_'.join(f'{axis}{ranks[axis]}of{size}' for axis, size in layout)}.pt"


def save_optimizer(optimizer: Any, directory: Path, mesh: DeviceMesh, zero_1: bool) -> None:
    """Write this rank's optimizer states; of those that have the same, the first writes."""
    layout = layout_of(mesh, zero_1)
    shards, first = mesh["dp_shard"].size(), mesh["dp_replicate"] if mesh["dp_shard"].size() > 1 else mesh["dp_cp"]
    if (zero_1 and shards == 1) or first.get_local_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        state = {"data_parallel_size": mesh["dp"].size(), "optimizer": local_states(optimizer.state_dict())}
        torch.save(state, directory / optimizer_file(layout, _ranks(layout, mesh)))


def load_optimizer(optimizer: Any, directory: Path, mesh: DeviceMesh, zero_1: bool) -> None:
    """Read what `save_optimizer` wrote at the same layout."""
    layout = layout_of(mesh, zero_1)
    file = directory / optimizer_file(layout, _ranks(layout, mesh))
    states = torch.load(file, map_location="cpu", weights_only=True)["optimizer"]
    optimizer.load_state_dict(sharded_states(states, optimizer))


def _ranks(layout: Layout, mesh: DeviceMesh) -> dict[str, int]:
    return {axis: mesh.get_local_rank(axis) for axis, _ in layout}


def check_resumable(directory: Path, mesh: DeviceMesh | None, zero_1: bool) -> None:
    """Raise `CheckpointError` unless `directory` is complete and its optimizer state was saved at this layout."""
    if not is_complete(directory):
        raise CheckpointError(
            f"{directory} is no complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing or cut "
            f"short. Saving was interrupted; resume from an earlier checkpoint."
        )
    layout = layout_of(mesh, zero_1)
    layouts = {
        tuple((axis, int(size)) for axis, size in re.findall(r"_([a-z_]+?)\d+of(\d+)", file.name))
        for file in directory.glob("optimizer_*of*.pt")
    }
    if len(layouts) > 1:
        raise CheckpointError(f"{directory} mixes optimizer states of several layouts; resume from another checkpoint.")
    saved = layouts.pop() if layouts else ()
    if saved != layout and (saved or (directory / OPTIMIZER_NAME).exists()):
        raise CheckpointError(
            f"The optimizer state in {directory} was saved at {_described(saved)} and can't be resumed at "
            f"{_described(layout)} yet. Launch with {_described(saved)}, or start a new run from the weights: they are "
            "a stock directory that from_pretrained loads at any size."
        )
    if mesh is None or not layout:
        return
    files = [
        optimizer_file(layout, dict(zip([axis for axis, _ in layout], ranks, strict=True)))
        for ranks in itertools.product(*(range(size) for _, size in layout))
    ]
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        raise CheckpointError(
            f"{directory} holds no optimizer state ({missing[0]} is missing): it was saved with save_only_model=True, "
            "or is not whole. Start a new run from its weights with from_pretrained."
        )
    state = torch.load(directory / files[0], map_location="cpu", weights_only=True, mmap=True)
    data_parallel_size = state["data_parallel_size"]
    if data_parallel_size != mesh["dp"].size():
        raise CheckpointError(
            f"{directory} was saved with {data_parallel_size} data-parallel ranks and can't be resumed with "
            f"{mesh['dp'].size()} yet: launch {data_parallel_size * math.prod(size for _, size in layout)} processes."
        )


def _described(layout: Layout) -> str:
    sizes = [f"{AXES[axis]}={size}" for axis, size in layout]
    return " and ".join(sizes) + (" with zero_1" if {"dp", "cp"} & dict(layout).keys() else "") or "one process a copy"


def is_complete(directory: Path) -> bool:
    """Whether a checkpoint was saved to its end: the trainer state is written after all ranks have written theirs."""
    try:
        json.loads((directory / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def newest_complete_checkpoint(output_dir: Path) -> Path:
    """The checkpoint of the last step that was saved to its end; logs which ones it skips.

    Raises `CheckpointError` if there is none.
    """
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    steps = {
        int(match[1]): path
        for path in output_dir.glob("*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    }
    for step in sorted(steps, reverse=True):
        if is_complete(steps[step]):
            return steps[step]
        logger.warning(f"Skipping {steps[step]}: saving it was interrupted.")
    raise CheckpointError(
        f"There is no complete checkpoint in {output_dir}, which resume_from_checkpoint=True asks for."
    )


def save_device_rng(directory: Path, process_index: int, device: torch.device) -> None:
    """Write the state of the NeuronCore's generator, which transformers leaves out of its checkpoints."""
    if device.type == "neuron":
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            torch.get_device_module(device).get_rng_state(device), directory / f"rng_state_neuron_{process_index}.pth"
        )


def load_device_rng(directory: Path, process_index: int, device: torch.device) -> None:
    """Restore what `save_device_rng` wrote; without the file, say that dropout will draw other masks."""
    if device.type != "neuron":
        return
    file = directory / f"rng_state_neuron_{process_index}.pth"
    if file.exists():
        torch.get_device_module(device).set_rng_state(torch.load(file, map_location="cpu", weights_only=True), device)
    else:
        logger.warning(f"{file} is missing: dropout draws other masks than it would have without the interruption.")
