"""What one optimizer step of a layout takes, and of what: the price of its operators, collectives and waiting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

from optimum_trn.cost import CALIBRATION, Calibration
from optimum_trn.cost import collectives as links
from optimum_trn.cost.cores import Machine
from optimum_trn.cost.operators import Demand, demand_of
from optimum_trn.parallel.mesh import ParallelConfig
from optimum_trn.patching.balance import balanced_ends
from optimum_trn.planning import stream
from optimum_trn.planning.timeline import least_seconds, step_seconds
from optimum_trn.planning.workload import Layout, Workload

BUCKET_BYTES = 50e6
"""Gradients are reduced in buckets of 50 MB, the default of BUCKET_CAP_MB and of ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB."""

INPUT_BYTES_PER_SECOND = 1e9
"""From the host to a core: an assumption, of a part of the step that is negligible unless the host is slow."""


@dataclass(frozen=True)
class StepEstimate:
    """Predicted seconds of one optimizer step, with `parts` that add up to it.

    `stages` are (forward, backward) seconds of one micro-batch on each pipeline stage; `parameters` are those of the
    fullest rank. `model_flops` are those of the whole batch without recomputation, which `mfu` is made of.
    """

    seconds: float
    parts: dict[str, float]
    stages: tuple[tuple[float, float], ...]
    layers_per_stage: tuple[int, ...]
    parameters: float
    model_flops: float
    peak_flops: float
    sequences: int
    tokens: int
    engines: Demand = field(repr=False, default=Demand())

    @property
    def sequences_per_second(self) -> float:
        return self.sequences / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the part of the peak that the model's own arithmetic takes."""
        return self.model_flops / self.seconds / self.peak_flops


@dataclass(frozen=True)
class Piece:
    """Seconds of computation and of exposed collectives that a part of the model takes, forward and backward."""

    compute: tuple[float, float]
    communication: tuple[float, float]

    @property
    def both(self) -> tuple[float, float]:
        return self.compute[0] + self.communication[0], self.compute[1] + self.communication[1]


def estimate_step(
    workload: Workload, layout: Layout, calibration: Calibration | None = None, *, play: bool = True
) -> StepEstimate:
    """Price one optimizer step; raises `PlanError` or `MeshError` for a layout that does not divide the work.

    Unless it is to `play` the schedule of a pipeline, the bubble is what it is at least.
    """
    constants = calibration or CALIBRATION[workload.machine.vendor]
    parallel, architecture, machine = layout.parallel, workload.architecture, workload.machine
    micro_batches = layout.micro_batches(workload)
    layer, engines = _layer(workload, _alike(layout), constants)
    before, after = _ends(workload, _alike(layout), constants)
    whole = sum(layer.both)
    counts = layers_per_stage(
        architecture.layers, parallel.num_stages, sum(before.both) / whole, sum(after.both) / whole
    )
    parameters = parameters_per_stage(workload, layout, counts)

    launch = constants.launch_seconds
    stages, communication = [], 0.0
    for stage, count in enumerate(counts):
        first, last = stage == 0, stage == len(counts) - 1
        pieces = [(layer, count), (before, int(first)), (after, int(last))]
        extra = _seconds(stream.accumulation(workload, parameters[stage]), workload, constants)
        forward = sum(piece.both[0] * times for piece, times in pieces)
        backward = sum(piece.both[1] * times for piece, times in pieces) + extra
        partition = _partition_seconds(workload, layout, parameters[stage], constants)
        stages.append((forward + partition[0] + launch, backward + partition[1]))
        communication = max(communication, sum(sum(p.communication) * n for p, n in pieces) + sum(partition))
    pipeline = parallel.pipeline_parallel_size
    passes = 3 if parallel.pipeline_schedule == "zero_bubble" else 2
    if pipeline > 1:  # each pass of a stage is a graph of its own
        stages = [(forward, backward + (passes - 1) * launch) for forward, backward in stages]
    transfer = transfer_seconds(workload, layout)
    forward_times, backward_times = [s[0] for s in stages], [s[1] for s in stages]
    per_rank = [sum(sum(stages[s]) for s in range(rank, len(stages), pipeline)) for rank in range(pipeline)]
    busy = micro_batches * max(per_rank)
    running = busy
    if pipeline > 1:
        name = parallel.pipeline_schedule
        seconds_of = step_seconds if play else least_seconds
        running = max(busy, seconds_of(name, pipeline, micro_batches, forward_times, backward_times, transfer))
    fullest = max(
        sum(parameters[stage] for stage in range(rank, len(parameters), pipeline)) for rank in range(pipeline)
    )
    gradients = _gradient_seconds(workload, layout, fullest, constants, backward_times[-1])
    shards = _optimizer_shards(layout, workload)
    optimizer = _seconds(stream.optimizer_step(workload, fullest / shards), workload, constants) + launch
    inputs = micro_batches * layout.micro_batch * workload.sequence_length * _input_bytes(workload)
    loading = inputs / INPUT_BYTES_PER_SECOND
    variation = (running + optimizer) * constants.node_variation * expected_maximum(workload.nodes)
    graphs = micro_batches * (passes if pipeline > 1 else 1) * (len(stages) // pipeline)
    parts = {
        "compute": busy - micro_batches * communication * len(stages) / pipeline - graphs * launch,
        "collectives in layers": micro_batches * communication * len(stages) / pipeline,
        "launches": graphs * launch,
        "pipeline bubble": running - busy,
        "gradient reduction": gradients,
        "optimizer": optimizer,
        "data loading": loading,
        "slowest node": variation,
    }
    sequences = workload.global_batch
    return StepEstimate(
        seconds=sum(parts.values()),
        parts=parts,
        stages=tuple(stages),
        layers_per_stage=tuple(counts),
        parameters=fullest,
        model_flops=sequences * architecture.model_flops(workload.sequence_length),
        peak_flops=workload.world_size * machine.core.mfu_flops["fp32" if workload.precision == "fp32" else "bf16"],
        sequences=sequences,
        tokens=sequences * workload.sequence_length,
        engines=engines * micro_batches * (architecture.layers / pipeline),
    )


def layers_per_stage(layers: int, stages: int, before: float = 0.0, after: float = 0.0) -> list[int]:
    """How many layers each stage has, cut where the trainer cuts: so that the slowest stage is as fast as can be.

    `before` and `after` are what the first and last stage have besides, in layers.
    """
    return list(_cut(layers, stages, round(before, 1), round(after, 1)))


@lru_cache(maxsize=4096)
def _cut(layers: int, stages: int, before: float, after: float) -> tuple[int, ...]:
    if stages == 1:
        return (layers,)
    ends = [-1, *balanced_ends([1.0] * layers, stages, before, after), layers - 1]
    return tuple(end - start for start, end in pairwise(ends))


def parameters_per_stage(workload: Workload, layout: Layout, counts: list[int]) -> list[float]:
    """Parameters of one rank on each stage; what tensor parallelism copies (keys and values, norms) counts on each."""
    architecture, parallel = workload.architecture, layout.parallel
    tensor, sizes = parallel.tensor_parallel_size, stream.Sizes.of(workload, layout)
    hidden = architecture.hidden
    attention = architecture.attention_blocks * architecture.attention_weights_of(sizes.heads, sizes.kv_heads)
    matrices = 3 if architecture.gated else 2
    width = sizes.width * max(1, sizes.experts) + sizes.shared_width
    feed_forward = architecture.feed_forward_blocks * hidden * matrices * width
    per_layer = attention + feed_forward + architecture.small_weights
    table = math.ceil(architecture.vocabulary / tensor) * hidden
    found = [float(count * per_layer) for count in counts]
    found[0] += (architecture.patch_width * hidden or table) + architecture.positions * hidden
    if len(counts) > 1 or not architecture.tied:
        found[-1] += table
    if architecture.masked:
        found[-1] += 2 * hidden**2 + math.ceil(architecture.vocabulary / tensor)
    return found


def expected_maximum(count: int) -> float:
    """Of that many draws from a standard normal distribution (Blom 1958)."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _seconds(operators: list[stream.Operator], workload: Workload, constants: Calibration) -> float:
    return demand_of(operators, workload.machine.core, constants).seconds(constants.concurrency)


def lower_bound(workload: Workload, layout: Layout, calibration: Calibration | None = None) -> float:
    """Seconds that a step takes at least: its layers, spread evenly over the pipeline, without any waiting."""
    constants = calibration or CALIBRATION[workload.machine.vendor]
    layer, _ = _layer(workload, _alike(layout), constants)
    share = workload.architecture.layers / layout.parallel.pipeline_parallel_size
    return layout.micro_batches(workload) * sum(layer.both) * share


def _alike(layout: Layout) -> Layout:
    """The layout without what a single layer does not depend on."""
    parallel = replace(
        layout.parallel,
        pipeline_parallel_size=1,
        pipeline_schedule="1f1b",
        zero_1=True,
        mics_partition_size=None,
    )
    return replace(layout, parallel=parallel)


@lru_cache(maxsize=65536)
def _layer(workload: Workload, layout: Layout, constants: Calibration) -> tuple[Piece, Demand]:
    """One layer on one rank, and what it takes of each engine."""
    forward, backward = stream.layer(workload, layout)
    core = workload.machine.core
    demands = demand_of(forward, core, constants), demand_of(backward, core, constants)
    exposed = 1 - constants.collective_overlap
    collectives = _layer_collectives(workload, layout)
    compute = demands[0].seconds(constants.concurrency), demands[1].seconds(constants.concurrency)
    return Piece(compute, (collectives[0] * exposed, collectives[1] * exposed)), demands[0] + demands[1]


def _layer_collectives(workload: Workload, layout: Layout) -> tuple[float, float]:
    """Seconds of collectives on the way through a layer, forward and backward.

    Tensor parallelism sums once a block each way (Shoeybi et al. 2019, arXiv:1909.08053); with sequence parallelism a
    sum is a reduce-scatter and an all-gather (Korthikanti et al. 2022, arXiv:2205.05198), whose backward pass gathers
    the inputs of sharded weights again, beside the product for the gradient of the input, which does not wait for it.
    """
    parallel, machine, architecture = layout.parallel, workload.machine, workload.architecture
    sizes = stream.Sizes.of(workload, layout)
    tensor, context, experts = (
        parallel.tensor_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_parallel_size,
    )
    size = float(sizes.tokens * architecture.hidden * sizes.itemsize)
    ranks = links.group(machine, tensor, 1)
    forward = backward = 0.0
    if parallel.sequence_parallel:
        gather, scatter = links.all_gather(size, ranks, machine), links.reduce_scatter(size, ranks, machine)
        forward = backward = architecture.blocks * (gather + scatter)
    else:
        forward = backward = architecture.blocks * links.all_reduce(size, ranks, machine)
    if architecture.experts and experts > 1:
        routed = sizes.tokens * architecture.experts_per_token / tensor * architecture.hidden * sizes.itemsize
        exchange = 2 * links.all_to_all(routed, links.group(machine, experts, 1), machine)
        forward, backward = forward + exchange, backward + exchange
    if context > 1:
        keys = 2 * layout.micro_batch * sizes.queries * sizes.kv_heads * architecture.head_width * sizes.itemsize
        ring = (context - 1) * links.send(keys, tensor, machine)
        forward, backward = forward + ring, backward + 2 * ring
    if parallel.recompute not in (None, "selective"):
        backward += forward * (1.0 if parallel.recompute == "full" else float(parallel.recompute or 0))
    return forward, backward


@lru_cache(maxsize=65536)
def _ends(workload: Workload, layout: Layout, constants: Calibration) -> tuple[Piece, Piece]:
    """What stands before the layers and after them."""
    core, machine = workload.machine.core, workload.machine
    sizes = stream.Sizes.of(workload, layout)
    size = float(sizes.tokens * workload.architecture.hidden * sizes.itemsize)
    ranks = links.group(machine, layout.parallel.tensor_parallel_size, 1)
    exposed = 1 - constants.collective_overlap
    sequence = layout.parallel.sequence_parallel
    one_way = links.reduce_scatter(size, ranks, machine) if sequence else links.all_reduce(size, ranks, machine)
    pieces = []
    for part, collectives in (
        (stream.embedding(workload, layout), (one_way, one_way if sequence else 0.0)),
        (stream.head(workload, layout), (one_way if sequence else 0.0, one_way)),
    ):
        demands = [demand_of(operators, core, constants).seconds(constants.concurrency) for operators in part]
        pieces.append(Piece((demands[0], demands[1]), (collectives[0] * exposed, collectives[1] * exposed)))
    return pieces[0], pieces[1]


def _data_group(workload: Workload, layout: Layout) -> links.Group:
    """The ranks that average gradients: those with other sequences or other tokens of them."""
    parallel = layout.parallel
    size = layout.data_parallel_size(workload) * parallel.context_parallel_size
    return links.group(workload.machine, size, parallel.tensor_parallel_size)


def _partition_seconds(
    workload: Workload, layout: Layout, parameters: float, constants: Calibration
) -> tuple[float, float]:
    """MiCS: each micro-batch gathers the weights twice and scatters the gradients once, inside the partition group."""
    shards = layout.partition_ranks
    if shards is None or shards == 1:
        return 0.0, 0.0
    machine = workload.machine
    ranks = links.group(machine, shards, layout.parallel.tensor_parallel_size)
    blocks = workload.architecture.layers + 1
    gather = blocks * links.all_gather(parameters * workload.weight_bytes / blocks, ranks, machine)
    scatter = blocks * links.reduce_scatter(parameters * workload.gradient_bytes / blocks, ranks, machine)
    exposed = 1 - constants.collective_overlap
    return gather * exposed, (gather + scatter) * exposed


def _gradient_seconds(
    workload: Workload, layout: Layout, parameters: float, constants: Calibration, backward: float
) -> float:
    """Once a step: gradients are averaged over the data-parallel ranks, and with ZeRO-1 new weights gathered.

    Buckets are reduced beside the rest of the last backward pass: by engines of their own, as concurrent as the others.
    """
    machine, parallel = workload.machine, layout.parallel
    size = parameters * workload.gradient_bytes
    ranks = _data_group(workload, layout)
    shards = layout.partition_ranks
    if shards is not None:
        replicas = links.group(machine, ranks.size // shards, parallel.tensor_parallel_size * shards)
        return _bucketed(links.all_reduce, size / shards, replicas, workload)
    if parallel.zero_1:
        seconds = _bucketed(links.reduce_scatter, size, ranks, workload)
        after = _bucketed(links.all_gather, parameters * workload.weight_bytes, ranks, workload)
    else:
        seconds, after = _bucketed(links.all_reduce, size, ranks, workload), 0.0
    return seconds - constants.concurrency * min(seconds, backward) + after


def _bucketed(
    collective: Callable[[float, links.Group, Machine], float], size: float, ranks: links.Group, workload: Workload
) -> float:
    """One collective after the other; of what they wait for messages, half is hidden.

    Collectives run on pairs of CC-cores (SDK: neuron-runtime/about/collectives.rst): two are under way at a time.
    """
    buckets = max(1, math.ceil(size / BUCKET_BYTES))
    apart = buckets * collective(size / buckets, ranks, workload.machine)
    return (apart + collective(size, ranks, workload.machine)) / 2


def _optimizer_shards(layout: Layout, workload: Workload) -> int:
    parallel: ParallelConfig = layout.parallel
    if layout.partition_ranks is not None:
        return layout.partition_ranks
    return _data_group(workload, layout).size if parallel.zero_1 else 1


def transfer_seconds(workload: Workload, layout: Layout) -> float:
    """From one pipeline stage to the next, whose ranks are as far apart as a stage has ranks."""
    pipeline = layout.parallel.pipeline_parallel_size
    if pipeline == 1:
        return 0.0
    sizes = stream.Sizes.of(workload, layout)
    size = sizes.residual_tokens * workload.architecture.hidden * sizes.itemsize
    return links.send(size, workload.world_size // pipeline, workload.machine)


def _input_bytes(workload: Workload) -> int:
    """Of one token: ids, mask, labels, 64-bit each, and the segment where there are two; of a patch, its floats."""
    if workload.architecture.patch_width:
        return 4 * workload.architecture.patch_width
    return 8 * (4 if workload.architecture.masked else 3)
