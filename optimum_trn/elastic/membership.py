"""Membership: who takes part from which generation on, as full snapshots in the store that the controller hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import xxhash

from optimum_trn.device.launched import CONTROLLER, LOCAL, MEMBER

POLL_SECONDS = 0.005
GENERATION, COMMITTED = "generation", "committed"  # keys: the newest generation, and the number of committed steps


@dataclass(frozen=True)
class Member:
    """A node as long as it lives: `member` is never used again, the `node` may come back as another member."""

    member: int
    node: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """All members of a generation, in order."""

    generation: int
    members: tuple[Member, ...]

    @property
    def digest(self) -> str:
        """A hash of everything in it."""
        return xxhash.xxh3_64_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())

    def to_json(self) -> str:
        """As text, with its hash."""
        return json.dumps({**asdict(self), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """The snapshot of a text; ValueError if it is not the one that was written."""
        fields = json.loads(text)
        members = tuple(Member(m["member"], m["node"], tuple(m["pids"])) for m in fields["members"])
        snapshot = cls(fields["generation"], members)
        if snapshot.digest != fields["digest"]:
            raise ValueError(f"The membership of generation {snapshot.generation} does not have the hash it came with.")
        return snapshot


class Superseded(Exception):
    """A newer generation than the one at hand has been published."""


class Membership:
    """What a worker reads and says in the controller's store.

    A generation is *prepared* when its snapshot is there, *ready* when every member has the state that it needs, and
    *active* when all members know that; a newer snapshot supersedes it at any point.
    """

    def __init__(self, store: Any, member: int, local: int = 0) -> None:
        self.store = store
        self.member = member
        self.local = local

    @classmethod
    def from_environment(cls) -> Membership:
        """Of the process that `optimum-trn launch` has started."""
        host, _, port = os.environ[CONTROLLER].rpartition(":")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return cls(store, int(os.environ[MEMBER]), int(os.environ[LOCAL]))

    @property
    def generation(self) -> int:
        """The newest generation that was published; 0 before the first."""
        return int(self.store.get(GENERATION))

    def snapshot(self, generation: int) -> Snapshot:
        """The members of a generation."""
        return Snapshot.from_json(self.store.get(f"snapshot/{generation}"))

    def announce(self) -> None:
        """This process has loaded everything and waits to be taken in."""
        self.store.set(f"present/{self.member}/{self.local}", str(os.getpid()))

    def ask_for_another(self, generation: int) -> None:
        """A generation did not work although all its members live: have it published again."""
        self.store.set(f"renew/{generation}", "1")

    def wait(self, generation: float, condition: Callable[[], Any], seconds: float = float("inf")) -> Any:
        """What `condition` gives as soon as it gives something; `Superseded` when a newer generation comes first.

        Raises TimeoutError after that many seconds.
        """
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if self.generation > generation:
                raise Superseded
            if time.monotonic() > deadline:
                raise TimeoutError(f"Generation {generation} did not get there within {seconds} s.")
            time.sleep(POLL_SECONDS)
        return value

    def peek(self, key: str) -> bytes | None:
        """The value of a key, or None if it has none."""
        return self.store.get(key) if self.store.check([key]) else None

    def decide(self, key: str, value: str) -> str:
        """Settle a question once for all: the first value that anybody proposes."""
        return self.store.compare_set(key, "", value).decode()

    def gather(self, key: str, value: str, others: Iterable[str], generation: int) -> dict[str, bytes]:
        """The values of all participants, by name, as soon as all have said theirs; as `wait` raises."""
        names = list(others)
        self.store.set(f"{key}/{self.member}.{self.local}", value)
        keys = [f"{key}/{name}" for name in names]
        self.wait(generation, lambda: self.store.check(keys))
        return {name: self.store.get(key) for name, key in zip(names, keys, strict=True)}
