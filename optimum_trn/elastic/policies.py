"""How a training job meets failures: what it pays while nothing fails, and what a failure costs it.

Only what the simulator needs to know of each design; the constants are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from optimum_trn.checkpoint.placement import mixed_placement


class Tier(Enum):
    """Where training goes on from after a failure."""

    STEP = "the step under way"
    MEMORY = "memory checkpoint"
    PERSISTENT = "persistent checkpoint"


class Recovery(NamedTuple):
    """What a failure costs: from where training goes on, and the seconds until it does."""

    tier: Tier
    seconds: float


class Policy(Protocol):
    """A design. Steps are counted from 0; `nodes` are those that train, and those that failed and are not replaced."""

    @property
    def name(self) -> str:
        """As tables have it."""

    @property
    def checkpoint_steps(self) -> int:
        """Steps between persistent checkpoints."""

    @property
    def memory_steps(self) -> int:
        """Steps between memory checkpoints; 0 if there are none."""

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the job stands still until lost nodes are replaced."""

    @property
    def saves_after_restart(self) -> bool:
        """Whether the first step after a restart is followed by a persistent checkpoint."""

    def pause(self) -> float:
        """Seconds for which training stops at a persistent checkpoint."""

    def slowdown(self) -> float:
        """Seconds of other work for every second of training."""

    def recover(self, nodes: int, lost: frozenset[int], down: frozenset[int]) -> Recovery:
        """When `lost` of `nodes` nodes fail while the others of `down` still miss their copies or their place."""

    def join(self, nodes: int) -> float:
        """Seconds for which training stops when nodes are added, so that there are `nodes` now."""


@dataclass(frozen=True)
class RestartFromCheckpoint:
    """Everything is started again from the last persistent checkpoint, on as many nodes as before."""

    checkpoint_steps: int
    checkpoint_seconds: float
    restart_seconds: Callable[[int], float]
    name: str = "restart from checkpoint"
    waits_for_nodes: bool = True
    saves_after_restart: bool = False
    memory_steps: int = 0

    def pause(self) -> float:
        """A synchronous checkpoint."""
        return self.checkpoint_seconds

    def slowdown(self) -> float:
        """None."""
        return 0.0

    def recover(self, nodes: int, lost: frozenset[int], down: frozenset[int]) -> Recovery:
        """Every failure is the same."""
        return Recovery(Tier.PERSISTENT, self.restart_seconds(nodes - len(lost | down)))

    def join(self, nodes: int) -> float:
        """Training is restarted on them."""
        return 0.0 if self.waits_for_nodes else self.restart_seconds(nodes)


@dataclass(frozen=True)
class Varuna(RestartFromCheckpoint):
    """As restarting, but at once on the nodes that are left (job morphing; Athlur et al., EuroSys 2022).

    It saves after the first step in its new form, as in the model of it in Oobleck's artifact.
    """

    name: str = "Varuna-like"
    waits_for_nodes: bool = False
    saves_after_restart: bool = True


@dataclass(frozen=True)
class Bamboo:
    """Each node computes its successor's stage as well; two neighbours that are lost end it (Thorpe et al., NSDI 2023).

    `redundancy` is the seconds of redundant work and waiting for every second of training; `failover_seconds` what a
    single loss costs until the pipelines are balanced again.
    """

    redundancy: float
    failover_seconds: float
    checkpoint_steps: int
    checkpoint_seconds: float
    restart_seconds: Callable[[int], float]
    name: str = "Bamboo-like"
    waits_for_nodes: bool = False
    saves_after_restart: bool = False
    memory_steps: int = 0

    def pause(self) -> float:
        """Checkpoints for the case that neighbours fail."""
        return self.checkpoint_seconds

    def slowdown(self) -> float:
        """The redundant work."""
        return self.redundancy

    def recover(self, nodes: int, lost: frozenset[int], down: frozenset[int]) -> Recovery:
        """A predecessor goes on with what a node did; nobody can if it is lost, too."""
        gone = lost | down
        if any((node - 1) % nodes in gone for node in lost) or any((node + 1) % nodes in gone for node in lost):
            return Recovery(Tier.PERSISTENT, self.restart_seconds(nodes - len(lost | down)))
        return Recovery(Tier.STEP, self.failover_seconds)

    def join(self, nodes: int) -> float:
        """Pipelines are balanced again."""
        return self.failover_seconds


@dataclass(frozen=True)
class MemoryCheckpoints:
    """Every node is started again from checkpoints in the memory of its group (Gemini, Wang et al., SOSP 2023)."""

    replicas: int
    memory_steps: int
    retrieval_seconds: float
    restart_seconds: Callable[[int], float]
    checkpoint_steps: int
    checkpoint_seconds: float
    name: str = "memory checkpoints"
    waits_for_nodes: bool = True
    saves_after_restart: bool = False

    def pause(self) -> float:
        """Persistent checkpoints are written while training goes on."""
        return 0.0

    def slowdown(self) -> float:
        """Copies travel while the links are idle."""
        return 0.0

    def recover(self, nodes: int, lost: frozenset[int], down: frozenset[int]) -> Recovery:
        """Memory is enough unless all of a group have failed before the first was whole again."""
        seconds = self.restart_seconds(nodes - len(lost | down)) + self.retrieval_seconds
        if nodes >= self.replicas and mixed_placement(nodes, self.replicas).survives(lost | down):
            return Recovery(Tier.MEMORY, seconds)
        return Recovery(Tier.PERSISTENT, seconds + self.checkpoint_seconds)

    def join(self, nodes: int) -> float:
        """They are waited for."""
        return 0.0


@dataclass(frozen=True)
class Elastic:
    """This design: pipelines are rebuilt from templates (Oobleck, SOSP 2023), and memory checkpoints are behind them.

    Up to `fault_tolerance` losses at once cost the step under way and `reconfigure_seconds`; more are those of
    `memory`, and where the nodes that are left are fewer than `minimum_nodes` it is waited for others.
    """

    fault_tolerance: int
    reconfigure_seconds: float
    memory: MemoryCheckpoints
    name: str = "optimum_trn"
    waits_for_nodes: bool = False
    saves_after_restart: bool = False
    memory_steps: int = field(init=False)
    checkpoint_steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_steps", self.memory.memory_steps)
        object.__setattr__(self, "checkpoint_steps", self.memory.checkpoint_steps)

    def pause(self) -> float:
        """As memory checkpoints."""
        return self.memory.pause()

    def slowdown(self) -> float:
        """None."""
        return 0.0

    def recover(self, nodes: int, lost: frozenset[int], down: frozenset[int]) -> Recovery:
        """Layers are copied from surviving pipelines."""
        if len(lost | down) <= self.fault_tolerance:
            return Recovery(Tier.STEP, self.reconfigure_seconds)
        return self.memory.recover(nodes, lost, down)

    def join(self, nodes: int) -> float:
        """Pipelines are rebuilt with them."""
        return self.reconfigure_seconds
