"""Reads stock weight files back into a model that is sharded already, in place."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError
from ..parallel import Placement
from ..parallel.mics import copy_whole
from ..patching import state_of
from .agreement import agreed
from .slices import LocalSlice, open_slices, shape_of
from .stock import tensors_from_files


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Overwrite all parameters and persistent buffers with those of a stock directory, each rank its own slices.

    All ranks must call it. Raises `CheckpointError` on every rank, and before any weight changes, if a file is missing
    or damaged, or holds other weights than the model.
    """
    directory = Path(directory)
    state = state_of(model)
    with agreed(f"Reading {directory}"):
        sources = tensors_from_files(model, open_slices([str(file) for file in _weight_files(directory)]))
        slices: list[tuple[Tensor, LocalSlice]] = []
        aliases = state.pipeline.staged.stages.aliases if state is not None and state.pipeline is not None else {}
        for tensor, names in _by_tensor(model):
            names = [*names, *aliases.get(names[0], ())]
            name = next((name for name in names if name in sources), None)
            if name is None:
                raise CheckpointError(f"{directory} lacks {names[0]}: it holds the weights of another model.")
            shape = shape_of(sources[name])
            placement = state.placements.get(name) if state is not None else None
            placement = placement or Placement.replicate(tensor.shape, 1)
            if tuple(shape) != placement.global_shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(shape)} in {directory} and {placement.global_shape} in the model: it "
                    f"holds the weights of another model."
                )
            rank = state.rank_of(name) if state is not None else 0
            slices.append((tensor, LocalSlice(sources[name], placement, rank, tensor.device, tensor.dtype)))
    for tensor, local in slices:
        copy_whole(tensor, local[...])


def _by_tensor(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each parameter and persistent buffer once, with all the names that tied weights go by."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _weight_files(directory: Path) -> list[Path]:
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        return [directory / SAFE_WEIGHTS_NAME]
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
