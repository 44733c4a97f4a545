"""The training state beside the weights in a checkpoint: optimizer shards, device generators, completeness."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..errors import CheckpointError

logger = logging.get_logger(__name__)


def optimizer_file(tp_rank: int, tensor_parallel_size: int) -> str:
    """The file that holds the optimizer state of one tensor-parallel rank's shards."""
    return f"optimizer_tp{tp_rank}of{tensor_parallel_size}.pt"


def save_optimizer(optimizer: Any, directory: Path, mesh: DeviceMesh) -> None:
    """Write this tensor-parallel rank's optimizer state; of its data-parallel copies, the first one writes."""
    if mesh.get_local_rank("dp") == 0:
        directory.mkdir(parents=True, exist_ok=True)
        state = {"data_parallel_size": mesh["dp"].size(), "optimizer": optimizer.state_dict()}
        torch.save(state, directory / optimizer_file(mesh.get_local_rank("tp"), mesh["tp"].size()))


def load_optimizer(optimizer: Any, directory: Path, mesh: DeviceMesh) -> None:
    """Read what `save_optimizer` wrote at the same layout."""
    file = directory / optimizer_file(mesh.get_local_rank("tp"), mesh["tp"].size())
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["optimizer"])


def check_resumable(directory: Path, mesh: DeviceMesh | None) -> None:
    """Raise `CheckpointError` unless `directory` is complete and its optimizer state was saved at this layout."""
    if not is_complete(directory):
        raise CheckpointError(
            f"{directory} is no complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing or cut "
            f"short. Saving was interrupted; resume from an earlier checkpoint."
        )
    sizes = {
        int(match[1]) for file in directory.glob("optimizer_tp*of*.pt") if (match := re.search(r"of(\d+)", file.name))
    }
    tensor_parallel_size = 1 if mesh is None else mesh["tp"].size()
    saved = sizes.pop() if sizes else 1
    if sizes:
        raise CheckpointError(f"{directory} mixes optimizer states of several layouts; resume from another checkpoint.")
    if saved != tensor_parallel_size and (saved > 1 or (directory / OPTIMIZER_NAME).exists()):
        raise CheckpointError(
            f"The optimizer state in {directory} was saved at tensor_parallel_size={saved} and can't be resumed "
            f"at {tensor_parallel_size} yet. Launch with tensor_parallel_size={saved}, or start a new run from the "
            "weights: they are a stock directory that from_pretrained loads at any size."
        )
    if mesh is None or tensor_parallel_size == 1:
        return
    missing = [
        name for rank in range(saved) if not (directory / (name := optimizer_file(rank, tensor_parallel_size))).exists()
    ]
    if missing:
        raise CheckpointError(
            f"{directory} holds no optimizer state ({missing[0]} is missing): it was saved with save_only_model=True, "
            "or is not whole. Start a new run from its weights with from_pretrained."
        )
    file = directory / optimizer_file(0, saved)
    data_parallel_size = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["data_parallel_size"]
    if data_parallel_size != mesh["dp"].size():
        raise CheckpointError(
            f"{directory} was saved with {data_parallel_size} data-parallel ranks and can't be resumed with "
            f"{mesh['dp'].size()} yet: launch {data_parallel_size * saved} processes."
        )


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
