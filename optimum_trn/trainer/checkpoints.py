"""Checkpoints of a Trainer: whole or not there, written by all ranks at once, resumed at any layout."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, _is_peft_model
from transformers.utils import logging

from ..checkpoint import optimizer_state
from ..checkpoint.agreement import agreed
from ..checkpoint.find import checked, newest_complete, present
from ..checkpoint.model_state import add_model
from ..checkpoint.random_state import axes_of, random_state_file
from ..checkpoint.reload import load_weights
from ..checkpoint.remote import rotate_remote, upload, upload_files
from ..checkpoint.saving import Saving
from ..checkpoint.steps import rotate
from ..device import saved_random_state
from ..errors import CheckpointError
from ..parallel import ParallelConfig
from ..parallel.zero1 import Zero1Optimizer
from ..store import MemoryStore

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class CheckpointsMixin(_Trainer):
    """Saves and resumes for a Trainer whose model and optimizer may be shared among ranks.

    What transformers writes into a checkpoint goes into a directory beside its place, together with the shards of all
    ranks, and moves there when it is complete: at once, or with `async_save` while training goes on.
    """

    model: Any
    lr_scheduler: Any
    mesh: DeviceMesh | None
    _saving: Saving | None = None  # that transformers is writing to now
    _under_way: Saving | None = None  # that is written while training goes on
    _resumed_from: dict[str, Any] | None = None  # what the manifest of the checkpoint says of its origin
    _to_push: str | None = None
    _memory: MemoryStore | None = None
    _saving_group: dist.ProcessGroup | None = None

    if TYPE_CHECKING:  # what the class that this is mixed into knows of its layout

        @property
        def parallel_config(self) -> ParallelConfig: ...

        @property
        def is_sharded(self) -> bool: ...

    # ---- Saving -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.finish_saving()
        run_dir = super()._get_output_dir(trial)
        directory = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        saving = self._saving = Saving(Path(directory), self._origin(), commits=self.args.should_save)
        try:
            with self._step_of_saving():
                super()._save_checkpoint(model, trial)
                self._name_best_checkpoint(saving, run_dir)
        finally:
            self._saving = None
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if self._url is not None:
            url = f"{self._url}{run_dir.removeprefix(str(self.args.output_dir))}"
            saving.committed += [
                partial(upload, Path(directory), f"{url}/{Path(directory).name}"),
                partial(rotate_remote, url, limit, best),
            ]
        saving.committed.append(partial(rotate, Path(directory), limit, best))
        self._under_way = saving
        if self._saves_asynchronously:
            saving.start(self._own_memory(), self._own_group())
        else:
            self.finish_saving()

    @contextmanager
    def _step_of_saving(self) -> Iterator[None]:
        """Around what some ranks write, between collectives: where the disk of one is full, all leave it together."""
        assert self._saving is not None
        with agreed(f"Saving {self._saving.directory}"):
            try:
                yield
            except (OSError, RuntimeError) as error:  # torch.save raises the latter, without a reason, on a full disk
                free = shutil.disk_usage(self._saving.outer).free
                raise CheckpointError(
                    f"{self._saving.directory} could not be saved: {error}. {free:,} bytes are free there. Nothing "
                    "that was saved before has changed."
                ) from error

    def finish_saving(self) -> None:
        """Return when the checkpoint that is being written is in its place; a collective.

        Raises `CheckpointError` on every rank if it could not be saved; earlier ones are as they were.
        """
        if self._under_way is None:
            return
        saving, self._under_way = self._under_way, None
        saving.finish()
        if self._to_push is not None:
            folder, self._to_push = self._to_push, None
            super()._push_from_checkpoint(folder)

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are; while one is being saved, where it is written. Who asks for others finds the last."""
        if self._saving is not None:
            return str(self._saving.outer)
        self.finish_saving()
        return super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As in Trainer, once the checkpoint is in its place."""
        if self._saving is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._to_push = str(self._saving.directory)

    def _origin(self) -> dict[str, Any]:
        """What the manifest says of this run."""
        return {
            "step": self.state.global_step,
            "axes": axes_of(self.mesh, self.args.world_size),
            "rows_per_step": self.get_total_train_batch_size(self.args),
            "optimizer_parameters": None if self._writes_optimizer_by_name else self._parameter_order(),
        }

    def _name_best_checkpoint(self, saving: Saving, run_dir: str) -> None:
        """Note where the best checkpoint will be, or is: Trainer looks for it where this one is being written."""
        step = self.state.best_global_step
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if not step or self.args.save_strategy == SaveStrategy.NO:
            return
        if Path(best) == saving.directory or os.path.exists(best):  # an evaluation may find it once it is saved
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(str(saving.staging / TRAINER_STATE_NAME))

    @property
    def _url(self) -> str | None:
        """Where checkpoints are uploaded to, if the output directory was given as the URL of another file system."""
        return getattr(self.args, "output_url", None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer; the output directory is uploaded if it was given as a URL."""
        super().save_model(output_dir, _internal_call)
        if self._url is not None and not _internal_call and output_dir in (None, self.args.output_dir):
            with agreed(f"Uploading to {self._url}"):
                if self.args.should_save:
                    upload_files(Path(str(self.args.output_dir)), self._url)

    @property
    def _saves_asynchronously(self) -> bool:
        return bool(getattr(self.args, "async_save", False))

    @property
    def _writes_optimizer_by_name(self) -> bool:
        """Whether the optimizer goes into the files of all ranks, not into transformers' own."""
        return self._saves_asynchronously or self._has_sharded_optimizer

    @property
    def _has_sharded_optimizer(self) -> bool:
        """Whether the optimizer has parts of parameters, or master weights, and not just the states of all of them."""
        if self.mesh is None:
            return isinstance(self._torch_optimizer, Zero1Optimizer)
        return self.is_sharded or (
            self.parallel_config.cuts_optimizer and dist.get_world_size(self.mesh.get_group("dp_cp")) > 1
        )

    def _own_memory(self) -> MemoryStore:
        self._memory = self._memory or MemoryStore()
        return self._memory

    def _own_group(self) -> dist.ProcessGroup | None:
        """The ranks that save, for a thread beside the one that trains."""
        if self._saving_group is None and dist.is_initialized():
            self._saving_group = dist.new_group(backend="gloo")
        return self._saving_group

    # ---- What goes into a checkpoint --------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        by_all = self.is_sharded or (self._saves_asynchronously and type(self.model).save_pretrained is _STOCK_SAVE)
        if self._saving is None or not by_all or not isinstance(self.model, PreTrainedModel):
            return self._save_by_first_rank(output_dir, state_dict)
        directory = Path(str(output_dir))
        with self._step_of_saving():
            if self.args.should_save:
                with _saved_as(self.model, partial(_note, self._saving, self.model, directory)):
                    super()._save(output_dir)
            else:
                add_model(self._saving.files, self.model, directory)

    def _save_by_first_rank(self, output_dir: str | None, state_dict: dict[str, Any] | None) -> None:
        directory = str(output_dir or self.args.output_dir)
        if not self.is_sharded:
            with self._step_of_saving() if self._saving is not None else nullcontext():
                return super()._save(output_dir, state_dict)
        with agreed(f"Saving to {directory}"):
            if self.args.should_save:
                os.makedirs(directory, exist_ok=True)
        with agreed(f"Saving to {directory}"):  # then every rank may read what rank 0 has written, tokenizer included
            if self.args.should_save:
                super()._save(output_dir, state_dict)
            else:
                self.model.save_pretrained(directory, is_main_process=False)  # joins the gathers

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saving is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        if self._writes_optimizer_by_name:
            optimizer_state.add_optimizer(self._saving.files, self._torch_optimizer, self.model)
        with self._step_of_saving():
            if not self._writes_optimizer_by_name:
                super()._save_optimizer_and_scheduler(output_dir)
            elif self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        with self._step_of_saving() if self._saving is not None else nullcontext():
            super()._save_rng_state(output_dir)
            if self.args.device.type == "neuron":  # transformers, which knows no such generator, may be on a real one
                saved_random_state.add(saved_random_state.random_state_file(self.args, output_dir))

    @property
    def _torch_optimizer(self) -> Any:
        """The optimizer without accelerate's wrapper."""
        return self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer

    def _parameter_order(self) -> list[str]:
        """The names of the optimizer's parameters, in the order in which transformers' own file has their states."""
        parts = optimizer_state.parts_of(self._torch_optimizer, self.model)
        return [part.names[0] for group in parts for part in group]

    # ---- Resuming ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in Trainer, at any layout; `resume_from_checkpoint=True` takes the newest checkpoint that is complete.

        Raises `CheckpointError` on every rank for a checkpoint that is incomplete or damaged.
        """
        self._resumed_from = None
        if resume_from_checkpoint:
            if resume_from_checkpoint is True:
                directory, manifest = newest_complete(Path(str(self.args.output_dir)), self._url)
            else:
                directory = present(resume_from_checkpoint)
                manifest = checked(directory)
            resume_from_checkpoint = str(directory)
            self._resumed_from = None if manifest is None else dict(manifest.origin)
            self._warn_of_other_rows(directory)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self.finish_saving()
        return output

    def _warn_of_other_rows(self, directory: Path) -> None:
        before = (self._resumed_from or {}).get("rows_per_step")
        now = self.get_total_train_batch_size(self.args)
        if before is not None and before != now:
            logger.warning(
                f"{directory} was saved by a run with {before} rows a step, and this one has {now}: it continues at "
                "the same step, with other rows. Keep per_device_train_batch_size x gradient_accumulation_steps x "
                "data-parallel cores the same to see the same rows."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if not self.is_sharded or _is_peft_model(model):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_weights(model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.finish_saving()
        if not self.is_sharded or _is_peft_model(self.model):
            return super()._load_best_model()
        load_weights(self.model, str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        directory = Path(checkpoint)
        by_name = (directory / optimizer_state.FILE_NAME).exists()
        if not by_name and not self._has_sharded_optimizer:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if by_name:
            optimizer_state.load_optimizer(self._torch_optimizer, self.model, directory)
        elif (directory / OPTIMIZER_NAME).exists():
            order = (self._resumed_from or {}).get("optimizer_parameters")
            optimizer_state.load_stock_optimizer(self._torch_optimizer, self.model, directory / OPTIMIZER_NAME, order)
        else:
            raise CheckpointError(
                f"{directory} holds no optimizer state: it was saved with save_only_model=True. Start a new run from "
                "its weights with from_pretrained."
            )
        self.lr_scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_rng_state(checkpoint)
        axes = (self._resumed_from or {}).get("axes")
        source = own = saved_random_state.random_state_file(self.args, checkpoint)
        if axes is not None:
            rank, world_size = self.args.process_index, self.args.world_size
            source = random_state_file(Path(checkpoint), axes, self.mesh, world_size, rank)
        with tempfile.TemporaryDirectory() as directory:  # transformers takes the file that is named after this process
            if source.exists():
                shutil.copy(source, Path(directory, own.name))
            super()._load_rng_state(directory)
            if self.args.device.type == "neuron":
                saved_random_state.restore(Path(directory, own.name))


_STOCK_SAVE = PreTrainedModel.save_pretrained


def _note(saving: Saving, model: Any, directory: Path, *args: Any, **kwargs: Any) -> None:
    """Stands in for `save_pretrained`: every rank will write what it has."""
    add_model(saving.files, model, directory)


@contextmanager
def _saved_as(model: Any, save: Any) -> Iterator[None]:
    """While active, `model.save_pretrained` is another function, on the instance."""
    before = vars(model).get("save_pretrained")
    model.save_pretrained = save
    try:
        yield
    finally:
        if before is None:
            del model.save_pretrained
        else:
            model.save_pretrained = before
