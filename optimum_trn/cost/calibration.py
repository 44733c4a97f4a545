"""The constants of the cost model that no data sheet gives: a few, the same for every model and every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Calibration:
    """Global constants of one kind of hardware.

    matrix_efficiency, vector_efficiency, memory_efficiency: the part that is reached of what an engine can do, once
    tiles and instructions are accounted for.
    concurrency: how much of the work of the less busy engines runs beside that of the busiest.
    collective_overlap: the part of a collective on the way through a layer that is hidden behind computation.
    launch_seconds: from the end of one graph to the start of the next.
    node_variation: standard deviation of the nodes' speed, as a part of it; a step waits for the slowest.
    scratch: bytes that a compiled graph needs beside activations, for every byte that a micro-batch in it keeps.
    code_bytes: programs, descriptor rings and buffers of the runtime on one core.
    """

    matrix_efficiency: float
    vector_efficiency: float
    memory_efficiency: float
    concurrency: float
    collective_overlap: float
    launch_seconds: float
    node_variation: float
    scratch: float
    code_bytes: float

    def with_values(self, **values: float) -> Calibration:
        """A copy with other values."""
        return replace(self, **values)


FITTED = ("vector_efficiency", "memory_efficiency", "concurrency", "launch_seconds", "node_variation")
"""What `python benchmarks/published.py --fit` finds from published throughput; all else has a source of its own."""

TRAINIUM = Calibration(
    # The documented tile model (cores.py) needs no further factor: a fit that is free to choose one returns 1.
    matrix_efficiency=1.0,
    vector_efficiency=0.49,
    memory_efficiency=0.89,
    concurrency=0.866,
    # "10-15 %" by collective engines beside computation: SDK about-neuron/faq/training/neuron-training.rst.
    collective_overlap=0.125,
    launch_seconds=0.0264,
    node_variation=0.0285,
    # Chosen so that the largest micro-batches of AWS's BERT-Large scripts fit a core of 16 GiB and twice them do not.
    scratch=3.0,
    # 96 MB of microcode for a core, and pages of 64 MB: SDK neuron-runtime/explore/device-memory.rst.
    code_bytes=512e6,
)

NVIDIA = Calibration(
    # Assumed: large products reach about 0.85 of the peak, the start of instructions included, and memory as much.
    matrix_efficiency=0.95,
    vector_efficiency=1.0,
    memory_efficiency=0.85,
    # Kernels of one stream follow each other; communication runs on another stream.
    concurrency=0.0,
    collective_overlap=0.5,
    launch_seconds=1e-3,
    node_variation=TRAINIUM.node_variation,
    scratch=0.3,
    # Assumed: context and libraries.
    code_bytes=1.5e9,
)
"""Assumptions, not fits: no published row of this comparison's GPU instance is used."""

CALIBRATION: dict[Literal["trainium", "nvidia"], Calibration] = {"trainium": TRAINIUM, "nvidia": NVIDIA}
