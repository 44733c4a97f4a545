"""The weights of a model in the stock files of a checkpoint, of which every rank writes what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..parallel import Placement
from ..parallel.mics import dtype_of, own_part
from ..patching import PatchState, state_of
from .agreement import is_first_rank
from .lazy import LazyTensor
from .pieces import Held, pieces
from .save import METADATA, FileLayout
from .shared_files import SharedFiles
from .stock import write_configs


def add_model(files: SharedFiles, model: Any, directory: Path) -> None:
    """Note the weights of a transformers model, sharded or whole; the first rank writes the small files beside them.

    The files are those of `save_pretrained`. Raises OSError where the disk does.
    """
    state = state_of(model)

    def held(name: str, tensor: Tensor, placement: Placement) -> LazyTensor:
        local, start = own_part(tensor.detach())
        dtype = tensor.dtype if local is tensor else dtype_of(model)
        boxes: list[Any] = []
        if not tensor.is_meta and writes(name, state):
            rank = 0 if state is None else state.rank_of(name)
            boxes = [(box, view) for box, view, first in pieces(local.contiguous(), start, placement, rank) if first]
        return Held(placement.global_shape, dtype, boxes, files.write)

    layout = FileLayout(model, state, leaf=held)
    is_first = is_first_rank()
    for file, tensors in layout.files.items():
        files.add(file, {name: layout.tensors[name] for name in tensors}, METADATA, header=is_first)
    if is_first:
        write_configs(model, str(directory))
        if layout.index is not None:
            text = json.dumps(layout.index, indent=2, sort_keys=True) + "\n"
            (directory / layout.index_name).write_text(text, encoding="utf-8")


def writes(name: str, state: PatchState | None) -> bool:
    """Whether this rank has the first copy of a parameter: of several that hold the same of it, the first writes it."""
    if state is None or state.mesh is None:
        return is_first_rank()
    if state.pipeline is not None and state.pipeline.staged.rank_of(name) != state.pp_rank:
        return False
    if state.experts is not None and name in state.experts.placements:
        return dist.get_rank(state.experts.replicas) == 0
    copies = "dp_replicate" if state.mesh["dp_shard"].size() > 1 else "dp_cp"
    return state.mesh.get_local_rank(copies) == 0
