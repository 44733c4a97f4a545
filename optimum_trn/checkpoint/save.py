"""Writes the stock files of a tensor-parallel model: gathered block by block, to one writer, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError
from ..parallel import Placement
from ..parallel.mics import as_saved
from ..patching import PatchState, state_of
from ..patching.adapters import has_adapters
from .agreement import agreed
from .deferred_init import id_of
from .gather import Gathered, OfStage, blocks
from .lazy import LazyTensor
from .safetensors_writer import SafetensorsWriter, file_order
from .stock import tensors_in_files, with_variant, without_tied_duplicates, write_configs

STAGING_PREFIX = ".saving-"  # of the directory in which files wait until all of them are complete
METADATA = {"format": "pt"}  # what transformers writes into the header, and asks for when it reads


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
    **kwargs: Any,
) -> None:
    """Write what the unpatched model's `save_pretrained` would write: config, generation config, full weights.

    A collective: every rank of the world must call it.  The first copy of the model gathers its tensors on its first
    rank, which writes them unless it says `is_main_process=False`; memory for one block of one tensor is all that this
    takes.  `state_dict` replaces the model's own tensors by others of the same local shapes.  Files appear in
    `save_directory` only when all of them are complete, so that an interrupted save leaves none half-written.  A model
    that is not patched saves itself, on the ranks that call it.

    Raises `CheckpointError` on every rank: an I/O error of the writer, or what cannot be saved from a sharded model.
    """
    state = state_of(model)
    if state is None:
        type(model).save_pretrained(
            model,
            save_directory,
            is_main_process=is_main_process,
            state_dict=None if state_dict is None else dict(state_dict),
            push_to_hub=push_to_hub,
            max_shard_size=max_shard_size,
            variant=variant,
            save_original_format=save_original_format,
            **kwargs,
        )
        return
    if push_to_hub or kwargs.get("distributed_checkpoint"):
        raise CheckpointError(
            "save_pretrained of a sharded model takes neither push_to_hub=True nor distributed_checkpoint=True. Save "
            "it, then call huggingface_hub.upload_folder on one rank."
        )
    with agreed(f"Preparing to save to {save_directory}"):
        layout = FileLayout(
            model,
            state,
            state_dict,
            max_shard_size,
            variant,
            save_original_format,
            leaf=partial(_gathered, model, state),
        )
    writes = is_main_process and state.dp_rank == 0 and state.tp_rank == 0 and state.pp_rank == 0
    save = StagedSave(os.fspath(save_directory), layout) if writes else None
    if state.holds_first_copy:
        for file, block in layout.blocks(state):
            if save is not None and block is not None:
                save.append(file, block)
    with agreed(f"Saving to {save_directory}"):
        if save is not None:
            save.finish(model)


class FileLayout:
    """Which tensors of a sharded model go into which stock file, in which order; the same on every rank.

    `files` maps a file's name to descriptors, meta tensors of the whole shapes, by the names that they have in it;
    `tensors` to lazy ones, made of what `leaf(name, tensor, placement)` makes of those of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        state: PatchState | None,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        save_original_format: bool = True,
        *,
        leaf: Callable[[str, Tensor, Placement], LazyTensor],
    ) -> None:
        if has_adapters(model):
            raise CheckpointError(
                "The model has adapters of PEFT. Call save_pretrained of the PeftModel to save them, or first "
                "merge_and_unload() to save the weights with what they have learned."
            )
        staged = state.pipeline.staged if state is not None and state.pipeline is not None else None
        own = dict(state_dict or model.state_dict())
        whole_model = without_tied_duplicates(model, own) if staged is None else staged.saved_tensors(own)
        self.tensors: dict[str, LazyTensor] = {}
        for name, tensor in whole_model.items():
            placement = state.placements.get(name) if state is not None else None
            placement = placement or Placement.replicate(tensor.shape, 1)
            expected = placement.local_shape(0 if state is None else state.rank_of(name))
            if (staged is None or staged.holds(name)) and tuple(tensor.shape) != expected:
                raise CheckpointError(f"{name} has the shape {tuple(tensor.shape)} where this rank holds {expected}.")
            self.tensors[name] = leaf(name, tensor, placement)
        whole = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self.tensors.items()
        }
        if save_original_format:
            self.tensors, whole = tensors_in_files(model, self.tensors), tensors_in_files(model, whole)
        self.weights_name = with_variant(SAFE_WEIGHTS_NAME, variant)
        # Views of one storage go into one file, as in transformers: what was one weight is not torn apart.
        split = split_state_dict_into_shards_factory(
            whole,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=id_of,
            filename_pattern=self.weights_name.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_size,
        )
        self.files = {file: {name: whole[name] for name in names} for file, names in split.filename_to_tensors.items()}
        self.index_name = with_variant(SAFE_WEIGHTS_INDEX_NAME, variant)
        self.index: dict[str, Any] | None = None
        if split.is_sharded:
            names = [name for name, _ in model.named_parameters()] if staged is None else whole_model
            placements = {} if state is None else state.placements
            count = sum(
                torch.Size(placements[name].global_shape if name in placements else own[name].shape).numel()
                for name in names
                if name in placements or state is None
            )
            self.index = {
                "metadata": {"total_parameters": count, **split.metadata},
                "weight_map": split.tensor_to_filename,
            }

    def blocks(self, state: PatchState) -> Iterator[tuple[str, Tensor | None]]:
        """(file, block) in the order in which the blocks are written; None on all ranks but the first of the group."""
        for file, names in self.files.items():
            for name in file_order(names):
                for block in blocks(self.tensors[name], state.tp_group):
                    yield file, block


def _gathered(model: PreTrainedModel, state: PatchState, name: str, tensor: Tensor, placement: Placement) -> LazyTensor:
    """A tensor that the first rank gathers."""
    tensor = as_saved(model, {name: tensor})[name]
    lazy: LazyTensor = Gathered(tensor, placement, state.group_of(name))
    if state.pipeline is not None:
        staged = state.pipeline.staged
        lazy = OfStage(lazy, staged.rank_of(name), staged.group.process_group, model.device)
    return lazy


class StagedSave:
    """The files of one save, in a directory of their own until `finish` moves them to where they belong.

    Other ranks are sending while this one writes: the first error is kept, for `finish` to raise, and the blocks that
    come after it are dropped.
    """

    def __init__(self, directory: str, layout: FileLayout) -> None:
        self.directory = directory
        self.layout = layout
        self.error: OSError | None = None
        self.staging = ""
        self.writer: SafetensorsWriter | None = None
        try:
            os.makedirs(directory, exist_ok=True)
            for name in os.listdir(directory):
                if name.startswith(STAGING_PREFIX):  # of a save that was killed
                    shutil.rmtree(os.path.join(directory, name))
            self.staging = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=directory)
        except OSError as error:
            self.error = error

    def append(self, file: str, block: Tensor) -> None:
        """Write the next block into a file, which is begun if it is another one than before."""
        if self.error is not None:
            return
        try:
            path = os.path.join(self.staging, file)
            if self.writer is None or self.writer.path != path:
                self._close()
                self.writer = SafetensorsWriter(path, self.layout.files[file], METADATA)
                self.writer.open()
            self.writer.append(block)
        except OSError as error:
            self.error = error

    def finish(self, model: PreTrainedModel) -> None:
        """Write the rest and move all into place; `CheckpointError` if anything failed, the old files untouched."""
        try:
            if self.error is not None:
                raise self.error
            self._close()
            write_configs(model, self.staging)
            if self.layout.index is not None:
                with open(os.path.join(self.staging, self.layout.index_name), "w", encoding="utf-8") as stream:
                    stream.write(json.dumps(self.layout.index, indent=2, sort_keys=True) + "\n")
            self._commit()
        except OSError as error:
            raise CheckpointError(
                f"The model could not be saved to {self.directory}: {error}. Weights that were there before are still "
                f"the old ones."
            ) from error
        finally:
            if self.staging:
                shutil.rmtree(self.staging, ignore_errors=True)

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _commit(self) -> None:
        """Move the files: one rename if there is one weight file; else the index goes first and comes last.

        Readers then find the old checkpoint, the new one, or for a moment one without an index, never a mixture.
        """
        index = self.layout.index_name
        new = sorted(os.listdir(self.staging), key=lambda name: (name == index, name))
        stem = re.escape(self.layout.weights_name.removesuffix(".safetensors"))
        weights = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(index)}")
        old = sorted(filter(weights.fullmatch, os.listdir(self.directory)), key=lambda name: (name != index, name))
        if self.layout.index is not None:
            for name in old:
                if name == index or name not in new:
                    os.remove(os.path.join(self.directory, name))
        for name in new:
            os.replace(os.path.join(self.staging, name), os.path.join(self.directory, name))
        if self.layout.index is None:
            for name in old:
                if name not in new:
                    os.remove(os.path.join(self.directory, name))
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
