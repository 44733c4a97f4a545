"""Saves to the memory of this node and of its peers, while training goes on, and finds what is left there.

A rank's part of a checkpoint is one object in the agents' stores, there as a whole or not at all. Of each rank there
are two: the last that all ranks have completed, and one that is under way; the former is forgotten only when all ranks
have agreed that the latter is complete everywhere. So one complete checkpoint exists at any moment.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..errors import StoreError
from ..store import MemoryStore, StoreClient
from .agents import Agents
from .packed import Packed
from .shared_files import SharedFiles
from .spans import IdleSpans

logger = logging.get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, on Linux


def temporary_directory(prefix: str) -> Path:
    """A new directory, in memory where the host has a file system for that."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))


def object_name(run: str, step: int, rank: int) -> str:
    """The name of what a rank has saved of a step of a run."""
    return f"memory/{run}/{step:010d}/{rank:06d}"


class MemorySaving:
    """A checkpoint on its way to memory; ranks put small files into `staging`, and note in `files` what they share."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.outer = temporary_directory("optimum_trn-saving-")
        self.directory = self.staging = self.outer / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        self.files = SharedFiles()

    def close(self) -> None:
        """Remove the small files."""
        shutil.rmtree(self.outer, ignore_errors=True)


class MemoryWriter:
    """Copies what a rank has saved to the agents of its node and of its peers, in a thread."""

    def __init__(self, agents: Agents, run: str, rank: int, spans: IdleSpans) -> None:
        self.agents = agents
        self.run = run
        self.rank = rank
        self.spans = spans
        self.step: int | None = None  # that is under way, or done and not yet agreed on
        self.complete: int | None = None
        """The last step that is complete on all ranks."""
        self._error: Exception | None = None
        self._memory = MemoryStore()
        self._thread: threading.Thread | None = None
        self._clients: dict[int, StoreClient] = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing is being copied."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, saving: MemorySaving, about: Mapping[str, Any]) -> None:
        """Copy a checkpoint to this process's memory, and go on from there in a thread."""
        self._memory.clear()
        saving.files.put_into(self._memory)
        packed = Packed()
        packed.put_files(saving.staging)
        self.step, self._error = saving.step, None

        def work() -> None:
            try:
                self._memory.move_to(packed)
                self._send(saving.step, packed.content({**about, "step": saving.step}))
            except (OSError, StoreError) as error:
                self._error = error

        self._thread = threading.Thread(target=work, name=f"memory checkpoint {saving.step}", daemon=True)
        self._thread.start()

    def _send(self, step: int, content: bytearray) -> None:
        name = object_name(self.run, step, self.rank)
        own, *peers = self.agents.holders(self.rank)
        self._client(own).put(name, content)
        for node in peers:
            self._client(node).put(name, content, pace=self.spans.pace)

    def finish(self) -> Exception | None:
        """Wait for the thread; what went wrong, if anything did. To be agreed on by all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def settle(self, succeeded: bool) -> None:
        """All ranks agree that the step is complete, or that it is not: the other one of the two slots is emptied."""
        step, self.step = self.step, None
        assert step is not None
        stale = self.complete if succeeded else step
        if succeeded:
            self.complete = step
        if stale is not None:
            self.forget(stale)

    def keep_only(self, step: int | None) -> None:
        """Forget what an earlier start of the job has saved of this rank, all but one step."""
        self.complete = step
        for node in self.agents.holders(self.rank):
            with contextlib.suppress(OSError, StoreError):
                for name in self._client(node).list(f"memory/{self.run}/"):
                    if name.endswith(f"/{self.rank:06d}") and name != object_name(self.run, step or -1, self.rank):
                        self._client(node).delete(name)

    def forget(self, step: int) -> None:
        """Delete what this rank has saved of a step; agents that are gone need not."""
        for node in self.agents.holders(self.rank):
            with contextlib.suppress(OSError, StoreError):
                self._client(node).delete(object_name(self.run, step, self.rank))

    def _client(self, node: int) -> StoreClient:
        if node not in self._clients:
            self._clients[node] = self.agents.client(node)
        return self._clients[node]

    def close(self) -> None:
        """End the connections."""
        for client in self._clients.values():
            client.close()
