"""`Accelerator.save_state` and `load_state` of sharded models: the files of a Trainer's checkpoint, at any layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator

from ..checkpoint import optimizer_state
from ..checkpoint.agreement import agreed
from ..checkpoint.find import checked
from ..checkpoint.model_state import add_model
from ..checkpoint.random_state import axes_of
from ..checkpoint.reload import load_weights
from ..checkpoint.saving import Saving
from ..errors import CheckpointError


class StateMixin(Accelerator):
    """Saves and loads the models and optimizers of an accelerator by their parts; accelerate does the rest.

    One model and one optimizer have the file names of a Trainer's checkpoint; more than one are refused.
    """

    mesh: Any
    replication: Any

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As in accelerate, and whole or not there: `output_dir` appears when all ranks have written.

        Raises `CheckpointError` on every rank if it could not be saved, and for `automatic_checkpoint_naming`.
        """
        model, optimizer = self._one_of_each()
        if output_dir is None or not safe_serialization:
            raise CheckpointError("save_state of a sharded model takes an output_dir, and writes safetensors.")
        saving = Saving(Path(output_dir), {"axes": axes_of(self.mesh, self.state.num_processes)}, self.is_main_process)
        with self._without_parts():
            super().save_state(str(saving.staging), **kwargs)
        self.replication.settle()
        with agreed(f"Saving {output_dir}"):
            add_model(saving.files, model, saving.staging)
        if optimizer is not None:
            optimizer_state.add_optimizer(saving.files, optimizer.optimizer, model)
        saving.finish()
        return Path(output_dir)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As in accelerate, from a `save_state` at any layout; `CheckpointError` if it is damaged."""
        model, optimizer = self._one_of_each()
        if input_dir is None:
            raise CheckpointError("load_state of a sharded model takes an input_dir.")
        directory = Path(os.path.expanduser(input_dir))
        checked(directory)
        with self._without_parts():
            super().load_state(str(directory), load_kwargs, **kwargs)
        load_weights(model, directory)
        if optimizer is not None:
            optimizer_state.load_optimizer(optimizer.optimizer, model, directory)

    def _one_of_each(self) -> tuple[Any, Any]:
        if len(self._models) != 1 or len(self._optimizers) > 1:
            raise CheckpointError(
                f"save_state and load_state of sharded models take one model and one optimizer, not "
                f"{len(self._models)} and {len(self._optimizers)}: use an Accelerator for each."
            )
        return self.replication.models[0], next(iter(self._optimizers), None)

    @contextmanager
    def _without_parts(self) -> Iterator[None]:
        """While active, accelerate sees neither models nor optimizers."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
