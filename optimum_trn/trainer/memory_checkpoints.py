"""Checkpoints of a Trainer in the memory of its nodes, after every step that they fit into, and resuming from them."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..checkpoint.agents import Agents
from ..checkpoint.agreement import is_first_on_host, of_all_ranks, of_first_rank
from ..checkpoint.find import newest_complete
from ..checkpoint.memory_resume import PERSISTENT, Found, MemoryReader
from ..checkpoint.memory_saving import MemorySaving, MemoryWriter
from ..checkpoint.spans import IdleSpans
from ..checkpoint.steps import step_of, steps_in
from ..errors import CheckpointError
from .accelerator import DataParallelAccelerator
from .checkpoints import CheckpointsMixin

logger = logging.get_logger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Resumed:
    """From which tier a run goes on, at which step, and how many steps that had been begun to be saved are lost."""

    tier: str
    step: int
    lost_steps: int


class MemoryCheckpointsMixin(CheckpointsMixin):
    """With `memory_checkpoint_replicas`, the state after a step is copied to the memory of this node and of its peers.

    A step is left out where the copies of an earlier one are still under way, so that training never waits for them.
    `train(resume_from_checkpoint="auto")` takes the newest state of local memory, peer memory and the output directory.
    """

    resumed: Resumed | None = None
    """From where the last `train("auto")` went on; None where it began anew."""
    _writer: MemoryWriter | None = None
    _attempt: str = ""
    _found: Found | None = None
    _saved_in_memory: int = -1

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in Trainer, at any layout; "auto" takes the newest of local memory, peer memory and the output directory.

        Says in the log which of them it was and what is lost; begins anew if there is nothing. Raises `CheckpointError`
        on every rank for a checkpoint that is incomplete or damaged, if it was asked for.
        """
        replicas = getattr(self.args, "memory_checkpoint_replicas", 0)
        if replicas and self.args.save_only_model:
            raise ValueError(
                "memory_checkpoint_replicas saves what training needs to go on, save_only_model=True forbids that: "
                "leave one of them unset."
            )
        agents = Agents.of_environment(replicas, self.args.world_size) if replicas else None
        if resume_from_checkpoint == AUTO:
            resume_from_checkpoint = self._newest_of_all_tiers(agents)
        if agents is not None:
            self._begin_writing(agents)
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self._settle_writing(wait=True)
        finally:
            self._drop_resumed()
            self._end_writing()
        return output

    # ---- Saving -----------------------------------------------------------------------------------------------------

    def _begin_writing(self, agents: Agents) -> None:
        self._writer = MemoryWriter(agents, self._run_name, self.args.process_index, IdleSpans())
        self._writer.keep_only(None if self._found is None else self._found.step)
        self._attempt = of_first_rank(secrets.token_hex(8))
        if isinstance(self.accelerator, DataParallelAccelerator):
            self.accelerator.spans = self._writer.spans

    def _end_writing(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.spans.close()
            writer.close()
            if isinstance(self.accelerator, DataParallelAccelerator):
                self.accelerator.spans = None

    @property
    def _run_name(self) -> str:
        """Which objects of the agents are this run's: those of its output directory."""
        where = self._url or os.path.abspath(str(self.args.output_dir))
        return xxhash.xxh3_64_hexdigest(where.encode())

    @property
    def _saves_asynchronously(self) -> bool:
        return isinstance(self._saving, MemorySaving) or super()._saves_asynchronously

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._writer is not None and self._saved_in_memory != self.state.global_step:
            self._saved_in_memory = self.state.global_step
            self._writer.spans.begin_step()
            self._drop_resumed()
            if self._settle_writing(wait=False):
                self._save_to_memory(self._writer)

    def _save_to_memory(self, writer: MemoryWriter) -> None:
        saving = MemorySaving(self.state.global_step)
        self._saving = saving  # type: ignore[assignment]
        try:
            directory = str(saving.directory)
            self.store_flos()
            self.save_model(directory, _internal_call=True)
            self._save_optimizer_and_scheduler(directory)
            self._save_scaler(directory)
            self._save_rng_state(directory)
            if self.args.should_save:
                self._save_trainer_state(saving.directory)
            writer.start(saving, {**self._origin(), "attempt": self._attempt})
        finally:
            self._saving = None
            saving.close()

    def _save_trainer_state(self, directory: Path) -> None:
        """As Trainer does, but the states of callbacks are not added to the list of those that went to the disk."""
        states: dict[str, Any] = self.state.stateful_callbacks  # type: ignore[assignment]  # it is a list before that
        kept = dict(states)
        for callback in (*self.callback_handler.callbacks, self.control):
            name = type(callback).__name__
            if isinstance(callback, ExportableState) and not isinstance(kept.get(name), list):
                states[name] = callback.state()
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))
        states.clear()
        states.update(kept)

    def _settle_writing(self, wait: bool) -> bool:
        """Agree whether the step that is under way is complete; False if it still is, and `wait` does not say to wait.

        A collective, if there is a step under way.
        """
        writer = self._writer
        if writer is None or writer.step is None:
            return True
        if wait:
            writer.spans.close()
            writer.finish()
        if not all(of_all_ranks(writer.is_done)):
            return False
        step, error = writer.step, writer.finish()
        errors = of_all_ranks(None if error is None else str(error))
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        writer.settle(not failed)
        if failed and self.args.process_index == 0:
            kept = f"step {writer.complete}" if writer.complete is not None else "nothing"
            logger.warning(
                f"Step {step} is not in memory: on rank {', '.join(map(str, failed))}: {errors[failed[0]]} What is "
                f"there is {kept}."
            )
        return True

    # ---- Resuming ---------------------------------------------------------------------------------------------------

    def _newest_of_all_tiers(self, agents: Agents | None) -> str | None:
        self.resumed = self._found = None
        found, wrong = None, ["There are no memory checkpoints: memory_checkpoint_replicas is not set."]
        if agents is not None:
            reader = MemoryReader(agents, self._run_name, self.args.process_index, self.args.world_size)
            found, wrong = reader.find()
            reader.close()
        output_dir = Path(str(self.args.output_dir))
        persistent = of_first_rank(max(steps_in(output_dir), default=-1))
        directory = None
        if found is None or found.step < persistent or (self._url is not None and persistent < 0):
            try:
                directory, _ = newest_complete(output_dir, self._url)
            except CheckpointError as error:
                wrong.append(str(error))
        if directory is not None and found is not None and (step_of(directory.name) or 0) <= found.step:
            directory = None
        if directory is not None:
            newest = -1 if found is None else found.newest_seen
            if found is not None:
                self._remove(found)
            step = step_of(directory.name) or 0
            self.resumed = Resumed(PERSISTENT, step, max(0, newest - step))
        elif found is not None:
            self._found, directory = found, found.directory
            self.resumed = Resumed(found.tier, found.step, found.newest_seen - found.step)
        if self.args.process_index == 0:
            reasons = " ".join(wrong)
            if self.resumed is None:
                logger.warning(f"Nothing to resume from, training begins anew. {reasons}")
            else:
                lost = self.resumed.lost_steps
                logger.warning(
                    f"Resuming step {self.resumed.step} from {self.resumed.tier}; {lost} "
                    f"step{'' if lost == 1 else 's'} of which parts were saved later {'is' if lost == 1 else 'are'} "
                    f"lost. {reasons if wrong else ''}"
                )
        return None if directory is None else str(directory)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._found is not None and self._resumed_from is None:
            self._resumed_from = dict(self._found.origin)
        super()._load_rng_state(checkpoint)

    def _drop_resumed(self) -> None:
        """Free the memory that was resumed from, when all ranks have done a step since, or training has ended."""
        found, self._found = self._found, None
        if found is not None:
            self._remove(found)

    def _remove(self, found: Found) -> None:
        if is_first_on_host():
            found.remove()
