"""What is trained, where and how: the question that the planner answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimum_trn.cost.cores import Machine, Precision
from optimum_trn.errors import PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning.architecture import Architecture

OptimizerName = Literal["adamw", "lamb"]


@dataclass(frozen=True)
class Workload:
    """A training run on `nodes` machines: batches of `global_batch` sequences of `sequence_length` tokens.

    `flash_attention` computes scores in tiles and never keeps them. Raises `PlanError` for numbers that are not
    positive.
    """

    architecture: Architecture
    machine: Machine
    nodes: int
    sequence_length: int
    global_batch: int
    precision: Precision = "autocast"
    optimizer: OptimizerName = "adamw"
    flash_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "sequence_length", "global_batch"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be a positive number, not {getattr(self, name)}.")
        architecture = self.architecture
        if architecture.patch_width and self.sequence_length != architecture.positions:
            raise PlanError(
                f"sequence_length {self.sequence_length}: an image of {architecture.model_type} is "
                f"{architecture.positions} tokens, its patches and one for the class. Give that number."
            )
        if self.precision not in ("fp32", "bf16_sr", "autocast"):
            raise PlanError(f"precision must be fp32, bf16_sr or autocast, not {self.precision!r}.")
        if self.optimizer not in ("adamw", "lamb"):
            raise PlanError(f"optimizer must be adamw or lamb, not {self.optimizer!r}.")

    @property
    def world_size(self) -> int:
        """Ranks: all cores of all nodes."""
        return self.nodes * self.machine.num_cores

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as the model holds it."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient as it is accumulated and reduced."""
        return 2 if self.precision == "bf16_sr" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of what the optimizer keeps of one weight: two moments, and with autocast a float32 master weight."""
        return {"fp32": 8, "bf16_sr": 4, "autocast": 12}[self.precision]


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism and the micro-batch, in sequences of one rank."""

    parallel: ParallelConfig
    micro_batch: int = 1

    def data_parallel_size(self, workload: Workload) -> int:
        """Ranks that see different sequences; `MeshError` where the degrees do not divide the world."""
        return self.parallel.data_parallel_size(workload.world_size)

    @property
    def partition_ranks(self) -> int | None:
        """Ranks that MiCS shards the states over, those with other tokens of the same rows among them; else None."""
        size = self.parallel.mics_partition_size
        return size * self.parallel.context_parallel_size if isinstance(size, int) else None

    def micro_batches(self, workload: Workload) -> int:
        """Micro-batches of one rank in a step; `PlanError` where the global batch does not divide."""
        together = self.data_parallel_size(workload) * self.micro_batch
        if workload.global_batch % together:
            raise PlanError(
                f"A global batch of {workload.global_batch} sequences does not divide into micro-batches of "
                f"{self.micro_batch} on {together // self.micro_batch} data-parallel ranks."
            )
        return workload.global_batch // together

    def __str__(self) -> str:
        parallel = self.parallel
        parts = [f"tp={parallel.tensor_parallel_size}"]
        if parallel.sequence_parallel:
            parts.append("sp")
        if parallel.pipeline_parallel_size > 1:
            parts.append(f"pp={parallel.pipeline_parallel_size} {parallel.pipeline_schedule}")
        for name, short in (("context_parallel_size", "cp"), ("expert_parallel_size", "ep")):
            if getattr(parallel, name) > 1:
                parts.append(f"{short}={getattr(parallel, name)}")
        if parallel.mics_partition_size is not None:
            parts.append(f"mics={parallel.mics_partition_size}")
        elif parallel.zero_1:
            parts.append("zero-1 in the host" if parallel.optimizer_offload else "zero-1")
        if parallel.recompute is not None:
            parts.append(f"recompute={parallel.recompute}")
        return " ".join([*parts, f"micro-batch={self.micro_batch}"])
