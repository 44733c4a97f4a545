"""The best layouts of a workload: all that are valid, without those that do not fit, in the order of their price."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from optimum_trn.cost import Calibration
from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.schedules import ScheduleName
from optimum_trn.planning.memory import MemoryEstimate, estimate_memory
from optimum_trn.planning.step import StepEstimate, estimate_step, lower_bound
from optimum_trn.planning.workload import Layout, Workload

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b", "zero_bubble", "gpipe")
RECOMPUTE: tuple[str | float | None, ...] = (None, "selective", 0.5, "full")


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its step and its memory."""

    layout: Layout
    step: StepEstimate
    memory: MemoryEstimate


@dataclass
class SearchResult:
    """The best candidates, fastest first, and why each of the others is not among them.

    `reasons` counts layouts by reason; `tried` is how many there were, `priced` how many steps were computed in full.
    """

    best: list[Candidate] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    priced: int = 0


def layouts(workload: Workload, optimizer_offload: bool = False) -> Iterator[Layout]:
    """Every layout that the trainer would accept for the workload; degrees and micro-batches are powers of two.

    Tensor parallelism stays inside a node. MiCS excludes ZeRO-1, which it does more of, and pipelines, as in mesh.py.
    With `optimizer_offload`, those with ZeRO-1, whose states are then in the host's memory. They are not among the
    others, since what that costs in time is not predicted: no rate between a Trainium host and its chips is published.
    """
    architecture, world = workload.architecture, workload.world_size
    tensors = [size for size in _powers(min(architecture.tensor_limit, workload.machine.num_cores)) if not world % size]
    for tensor in tensors:
        rest = world // tensor
        pipelines = [s for s in _powers(architecture.layers) if not rest % s] if architecture.cuttable else [1]
        contexts = [s for s in _powers(min(rest, 32)) if not workload.sequence_length % (2 * s)]
        contexts = contexts if architecture.decoder else [1]
        experts = [
            s for s in _powers(architecture.experts) if s > 1 and not s % tensor and not architecture.experts % s
        ]
        sequences = (False, True) if tensor > 1 and architecture.decoder else (False,)
        for sequence, pipeline, context, expert in product(sequences, pipelines, contexts, [1, *experts]):
            if (pipeline > 1 and context > 1) or (expert > 1 and expert > rest * tensor // pipeline):
                continue
            copies = rest // pipeline // context
            partitions: list[int | None] = [None]
            if pipeline == context == expert == 1:
                partitions += [size for size in _powers(copies) if size > 1]
            for partition, zero, recompute in product(partitions, (True, False), RECOMPUTE):
                if optimizer_offload and (partition is not None or not zero):
                    continue
                if (partition is not None and not zero) or (
                    recompute == "selective" and (context > 1 or workload.flash_attention)
                ):
                    continue
                for schedule in SCHEDULES if pipeline > 1 else SCHEDULES[:1]:
                    if schedule == "interleaved_1f1b" and 2 * pipeline > architecture.layers:
                        continue
                    yield from _micro_batches(
                        workload,
                        ParallelConfig(
                            tensor_parallel_size=tensor,
                            sequence_parallel=sequence,
                            pipeline_parallel_size=pipeline,
                            pipeline_schedule=schedule,
                            context_parallel_size=context,
                            expert_parallel_size=expert,
                            zero_1=zero,
                            optimizer_offload=optimizer_offload,
                            mics_partition_size=partition,
                            recompute=recompute,
                        ),
                        copies,
                    )


def search(
    workload: Workload,
    *,
    keep: int = 10,
    among: Iterable[Layout] | None = None,
    exhaustive: bool = False,
    calibration: Calibration | None = None,
) -> SearchResult:
    """The `keep` fastest layouts that fit; `among` says which to look at instead of all.

    Layouts are looked at in the order of their lower bounds, until no other can be among the best; `exhaustive` prices
    all that fit, and finds the same.
    """
    result = SearchResult()
    bounded = []
    for number, layout in enumerate(layouts(workload) if among is None else among):
        result.tried += 1
        try:
            bounded.append((lower_bound(workload, layout, calibration), number, layout))
        except (MeshError, PlanError) as error:
            result.reasons[f"invalid: {error}"] += 1
    heap: list[tuple[float, int, Candidate]] = []  # the slowest of the best comes first
    for bound, number, layout in sorted(bounded, key=lambda entry: entry[:2]):
        slowest = -heap[0][0] if len(heap) == keep else float("inf")
        if bound > slowest and not exhaustive:
            result.reasons["slower, by its layers alone"] += 1
            continue
        memory = estimate_memory(workload, layout, calibration)
        if not memory.fits:
            result.reasons[f"does not fit: most of it {memory.largest}"] += 1
            continue
        if not exhaustive:
            least = estimate_step(workload, layout, calibration, play=False)
            if least.seconds > slowest:
                result.reasons[f"slower: {_reason(least)}"] += 1
                continue
        step = estimate_step(workload, layout, calibration)
        result.priced += 1
        entry = (-step.seconds, -number, Candidate(layout, step, memory))
        if len(heap) < keep:
            heapq.heappush(heap, entry)
        else:
            dropped = heapq.heappushpop(heap, entry)
            result.reasons[f"slower: {_reason(dropped[2].step)}"] += 1
    result.best = [entry[2] for entry in sorted(heap, key=lambda entry: (-entry[0], -entry[1]))]
    return result


def deciding_term(candidate: StepEstimate, best: StepEstimate) -> str:
    """The part of the step in which a layout loses most against the best one."""
    return max(candidate.parts, key=lambda name: candidate.parts[name] - best.parts[name])


def training_arguments(workload: Workload, layout: Layout) -> dict[str, Any]:
    """The fields of NeuronTrainingArguments that make this layout."""
    parallel, default = layout.parallel, ParallelConfig()
    names = (
        "tensor_parallel_size",
        "sequence_parallel",
        "pipeline_parallel_size",
        "pipeline_schedule",
        "context_parallel_size",
        "expert_parallel_size",
        "zero_1",
        "optimizer_offload",
        "mics_partition_size",
        "recompute",
    )
    found = {name: getattr(parallel, name) for name in names if getattr(parallel, name) != getattr(default, name)}
    found["per_device_train_batch_size"] = layout.micro_batch
    found["gradient_accumulation_steps"] = layout.micro_batches(workload)
    if workload.precision == "autocast":
        found["bf16"] = True
    return found


def _reason(step: StepEstimate) -> str:
    """The largest part of a step beside its computation."""
    return max((name for name in step.parts if name != "compute"), key=lambda name: step.parts[name])


def _powers(limit: int) -> list[int]:
    return [1 << place for place in range(max(1, limit).bit_length())]


def _micro_batches(workload: Workload, parallel: ParallelConfig, copies: int) -> Iterator[Layout]:
    """The layout with every micro-batch that divides the global batch and fills the pipeline."""
    if workload.global_batch % copies:
        return
    for size in _powers(workload.global_batch // copies):
        if not workload.global_batch // copies % size:
            count = workload.global_batch // copies // size
            if count >= parallel.pipeline_parallel_size:
                yield Layout(parallel, size)
