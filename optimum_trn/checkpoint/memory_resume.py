"""Finds the newest checkpoint that is whole in the memory of the nodes, and puts it where it can be resumed from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, StoreError
from ..store import DirectoryStore, StoreClient
from . import packed
from .agents import Agents
from .agreement import agreed, of_all_ranks, of_first_rank
from .memory_saving import object_name, temporary_directory

LOCAL, PEER, PERSISTENT = "local memory", "peer memory", "persistent checkpoint"


@dataclass(frozen=True)
class Found:
    """A checkpoint of memory in a directory of this node; `origin` is what its writer said of it."""

    directory: Path
    step: int
    tier: str
    newest_seen: int
    """The newest step of which any part was found."""
    origin: dict[str, Any]

    def remove(self) -> None:
        """Free the directory."""
        shutil.rmtree(self.directory.parent, ignore_errors=True)


class MemoryReader:
    """Reads the checkpoints of a run of `world_size` ranks from the agents that are left; every rank makes one."""

    def __init__(self, agents: Agents, run: str, rank: int, world_size: int) -> None:
        self.agents = agents
        self.run = run
        self.rank = rank
        self.world_size = world_size
        self._clients: dict[int, StoreClient] = {}

    def find(self) -> tuple[Found | None, list[str]]:
        """The newest checkpoint of which everything is there and undamaged, and what was wrong with others.

        A collective. Of every node one directory gets all files: the ranks of the node share out the reading.
        """
        held = of_first_rank(self._held() if self.rank == 0 else None)
        assert held is not None
        newest = max((step for of_node in held.values() for step, _ in of_node), default=-1)
        complete = sorted(set.intersection(*(self._steps_of(held, rank) for rank in range(self.world_size))))
        wrong: list[str] = []
        for step in reversed(complete):
            try:
                return self._assemble(step, held, newest), wrong
            except CheckpointError as error:
                wrong.append(f"Step {step} in memory: {error}")
        lacking = [str(rank) for rank in range(self.world_size) if not self._steps_of(held, rank)]
        if newest >= 0 and lacking:
            wrong.append(f"The memory that is left holds nothing of rank {', '.join(lacking)}.")
        elif newest >= 0 and not complete:
            wrong.append("The memory that is left holds no step of which all ranks have completed their part.")
        return None, wrong

    def close(self) -> None:
        """End the connections."""
        for client in self._clients.values():
            client.close()

    def _held(self) -> dict[int, set[tuple[int, int]]]:
        """By node that answers, (step, rank) of what its agent holds of this run."""
        found = {}
        for node in range(len(self.agents.addresses)):
            prefix = f"memory/{self.run}/"
            try:
                names = self._client(node).list(prefix)
            except (OSError, StoreError):
                continue  # its node is gone, or new
            found[node] = {_step_and_rank(name.removeprefix(prefix)) for name in names}
        return found

    def _steps_of(self, held: dict[int, set[tuple[int, int]]], rank: int) -> set[int]:
        nodes = self.agents.holders(rank)
        return {step for node in nodes for step, of_rank in held.get(node, ()) if of_rank == rank}

    def _assemble(self, step: int, held: dict[int, set[tuple[int, int]]], newest: int) -> Found:
        per_node = self.agents.ranks_per_node
        node, local = divmod(self.rank, per_node)
        directories = of_all_ranks(str(temporary_directory("optimum_trn-resume-")) if local == 0 else "")
        directory = Path(directories[node * per_node], f"checkpoint-{step}")
        tiers: list[str] = []
        origins: list[dict[str, Any]] = []
        try:
            with agreed(f"Reading step {step} from memory"):
                directory.mkdir(exist_ok=True)
                store = DirectoryStore(directory)
                try:
                    for rank in range(local, self.world_size, per_node):
                        content, tier = self._read(step, rank, held)
                        tiers.append(tier)
                        origins.append(packed.about(content))
                        _make_directories(directory, content)
                        packed.unpack(content, store)
                finally:
                    store.abandon()  # what is in memory need not be synchronised with a disk
        except CheckpointError:
            if local == 0:
                shutil.rmtree(directory.parent, ignore_errors=True)
            raise
        all_found = of_all_ranks((tiers, [origin["attempt"] for origin in origins]))
        if len({attempt for _, attempts in all_found for attempt in attempts}) > 1:
            if local == 0:
                shutil.rmtree(directory.parent, ignore_errors=True)
            raise CheckpointError("its parts were saved by different starts of the job")
        tier = PEER if any(PEER in of_rank for of_rank, _ in all_found) else LOCAL
        return Found(directory, step, tier, newest, origins[0])

    def _read(self, step: int, rank: int, held: dict[int, set[tuple[int, int]]]) -> tuple[bytearray, str]:
        """What a rank has saved, from its own node or else a peer; `CheckpointError` if all copies are damaged."""
        own, *_ = holders = self.agents.holders(rank)
        errors = []
        for node in holders:
            if (step, rank) not in held.get(node, ()):
                continue
            try:
                content = self._client(node).get(object_name(self.run, step, rank))
                packed.check(content)
                return content, LOCAL if node == own else PEER
            except (OSError, StoreError, CheckpointError) as error:
                errors.append(f"node {node}: {error}")
        raise CheckpointError(f"no copy of what rank {rank} has saved can be read ({'; '.join(errors)})")

    def _client(self, node: int) -> StoreClient:
        if node not in self._clients:
            self._clients[node] = self.agents.client(node)
        return self._clients[node]


def _step_and_rank(name: str) -> tuple[int, int]:
    step, _, rank = name.partition("/")
    return int(step), int(rank)


def _make_directories(directory: Path, content: bytearray) -> None:
    for parent in {Path(file).parent for file in packed.files(content)}:
        (directory / parent).mkdir(parents=True, exist_ok=True)
