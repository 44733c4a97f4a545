"""What a matrix product and a chain of elementwise operators take of each engine of a core."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from optimum_trn.cost.calibration import Calibration
from optimum_trn.cost.cores import Core


@dataclass(frozen=True)
class Demand:
    """Seconds that work takes of the matrix engine, the vector engines and the memory, each alone; and its FLOPs."""

    matrix: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.memory + other.memory,
            self.flops + other.flops,
        )

    def __mul__(self, times: float) -> Demand:
        return Demand(self.matrix * times, self.vector * times, self.memory * times, self.flops * times)

    def seconds(self, concurrency: float) -> float:
        """How long it takes where `concurrency` of the work of the less busy engines runs beside the busiest."""
        parts = (self.matrix, self.vector, self.memory)
        return concurrency * max(parts) + (1 - concurrency) * sum(parts)


@dataclass(frozen=True)
class Matmul:
    """`batch` products of m x k by k x n, of elements of `itemsize` bytes.

    Operands and result pass through HBM once, unless the product is a tile `in_memory` of the core (SBUF).
    """

    m: float
    k: float
    n: float
    itemsize: int
    batch: float = 1
    in_memory: bool = False

    def demand(self, core: Core, calibration: Calibration) -> Demand:
        """Tiles: the contraction fills the rows of the array, the weights' columns its columns, and the rest moves."""
        precision = "fp32" if self.itemsize == 4 else "bf16"
        columns_a_second = core.matrix_flops[precision] / (2 * core.rows * core.columns)
        starts_a_second = core.matrix_flops["bf16"] / (2 * core.rows * core.columns)  # in cycles, whatever moves
        stationary = math.ceil(self.k / core.rows) * math.ceil(self.n / core.columns)
        starts = math.ceil(self.m / core.moving) * core.matrix_overhead
        matrix = stationary * self.batch * (self.m / columns_a_second + starts / starts_a_second)
        flops = 2 * self.m * self.k * self.n * self.batch
        results = 0.0 if self.in_memory else self.m * self.n * self.batch
        elements = 0.0 if self.in_memory else self.m * self.k + self.k * self.n + self.m * self.n
        return Demand(
            matrix=matrix / calibration.matrix_efficiency,
            # A result leaves the accumulators (PSUM) through a vector engine: that of a tile, by the chain that
            # follows.
            vector=_vector_seconds(results, 1, min(self.n, core.moving), core, calibration),
            memory=elements * self.itemsize * self.batch / core.hbm_bytes_per_second / calibration.memory_efficiency,
            flops=flops,
        )


@dataclass(frozen=True)
class Chain:
    """Elementwise operators that are fused: `passes` instructions an element in SBUF, and `traffic` bytes of HBM in
    all.

    `row` is how many elements lie side by side, which is what one instruction works on in each lane.
    """

    elements: float
    passes: float
    traffic: float
    row: float = 512

    def demand(self, core: Core, calibration: Calibration) -> Demand:
        """Of the vector engines and the memory."""
        return Demand(
            vector=_vector_seconds(self.elements, self.passes, min(self.row, 2048), core, calibration),
            memory=self.traffic / core.hbm_bytes_per_second / calibration.memory_efficiency,
        )


def _vector_seconds(elements: float, passes: float, row: float, core: Core, calibration: Calibration) -> float:
    useful = row / (row + core.vector_overhead)
    return elements * passes / core.vector_rate / useful / calibration.vector_efficiency


def demand_of(operators: Iterable[Matmul | Chain], core: Core, calibration: Calibration) -> Demand:
    """What all of `operators` take together."""
    return sum((operator.demand(core, calibration) for operator in operators), Demand())
