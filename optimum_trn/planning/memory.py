"""What a training step keeps in the HBM of the fullest core, by what the bytes are for, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimum_trn.cost import CALIBRATION, Calibration
from optimum_trn.parallel.schedules import STAGES_PER_RANK, in_flight_bound
from optimum_trn.planning.step import BUCKET_BYTES, layers_per_stage, parameters_per_stage
from optimum_trn.planning.stream import Sizes
from optimum_trn.planning.workload import Layout, Workload

USABLE = 0.96
"""Of a core's HBM; the rest is lost between allocations in pages of 64 MB and more (SDK device-memory.rst)."""

HOST_BYTES_PER_WEIGHT = 12
"""Two moments and a copy of the weight, in float32 whatever the precision of the model (parallel/zero1.py)."""

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "collective buffers", "code", "scratch")


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes at the fullest moment of a step, by category, on the pipeline rank that needs most."""

    categories: dict[str, float]
    rank: int
    capacity: int

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.categories.values())

    @property
    def fits(self) -> bool:
        """Whether a core has that much HBM, with some to spare."""
        return self.total <= USABLE * self.capacity

    @property
    def largest(self) -> str:
        """The category that takes most."""
        return max(self.categories, key=lambda name: self.categories[name])


def estimate_memory(workload: Workload, layout: Layout, calibration: Calibration | None = None) -> MemoryEstimate:
    """The memory of a layout; raises `PlanError` or `MeshError` for one that does not divide the work."""
    constants = calibration or CALIBRATION[workload.machine.vendor]
    parallel, architecture = layout.parallel, workload.architecture
    micro_batches = layout.micro_batches(workload)
    pipeline, schedule = parallel.pipeline_parallel_size, parallel.pipeline_schedule
    # Stages of about equal length: which of them has one layer more depends on the prices, not on the memory.
    counts = layers_per_stage(architecture.layers, parallel.num_stages)
    parameters = parameters_per_stage(workload, layout, counts)
    shards, states = _shards(workload, layout)
    kept, whole = layer_activations(workload, layout)
    found = []
    for rank in range(pipeline):
        stages = range(rank, len(counts), pipeline)
        weights = sum(parameters[stage] for stage in stages)
        layers = max(counts[stage] for stage in stages)
        in_flight = in_flight_bound(schedule, pipeline, rank, micro_batches) if pipeline > 1 else 1
        # Gradients of weights that wait need what was recomputed for those of the inputs, until they have had their
        # turn.
        waiting = min(rank, micro_batches) if schedule == "zero_bubble" and pipeline > 1 else 0
        head = head_activations(workload, layout) if rank == (len(counts) - 1) % pipeline else 0.0
        found.append(
            {
                "weights": weights * workload.weight_bytes / shards,
                "gradients": weights * workload.gradient_bytes / shards,
                "optimizer": 0.0 if parallel.optimizer_offload else weights * workload.state_bytes / states,
                "activations": kept * layers * in_flight + (whole - kept) * layers * waiting + head,
                "collective buffers": _buffers(workload, layout, weights / max(1, layers * len(stages)), shards),
                "code": constants.code_bytes,
                "scratch": constants.scratch * kept * layers + whole,
            }
        )
    totals = [sum(categories.values()) for categories in found]
    rank = totals.index(max(totals))
    assert STAGES_PER_RANK[schedule] * pipeline >= len(counts)
    return MemoryEstimate(found[rank], rank, workload.machine.core.hbm_bytes)


def host_bytes(workload: Workload, layout: Layout) -> float:
    """Bytes of optimizer states and master weights that `optimizer_offload` puts in the memory of one host."""
    if not layout.parallel.optimizer_offload:
        return 0.0
    parallel = layout.parallel
    counts = layers_per_stage(workload.architecture.layers, parallel.num_stages)
    weights = sum(parameters_per_stage(workload, layout, counts)) / parallel.pipeline_parallel_size
    return weights * HOST_BYTES_PER_WEIGHT / _shards(workload, layout)[1] * workload.machine.num_cores


def layer_activations(workload: Workload, layout: Layout) -> tuple[float, float]:
    """Bytes that one layer keeps of a micro-batch for its backward pass, and those that it has while it runs.

    Counted as in Korthikanti et al. 2022 (arXiv:2205.05198), section 4: inputs of norms, products and activations, the
    masks of dropout, and scores where they are whole; recomputed layers keep their input only.
    """
    architecture, parallel, sizes = workload.architecture, layout.parallel, Sizes.of(workload, layout)
    item, hidden, head = sizes.itemsize, architecture.hidden, architecture.head_width
    stream = sizes.residual_tokens * hidden * (4 * item + (2 if architecture.dropout else 0))
    stream *= architecture.blocks / 2
    values = architecture.value_width
    heads: float = (
        sizes.tokens * (head * (sizes.heads + sizes.kv_heads) + values * (sizes.heads + sizes.kv_heads)) * item
    )
    if architecture.latent is not None:
        heads += sizes.tokens * (architecture.latent.query_rank + architecture.latent.key_value_rank) * item
    heads *= architecture.attention_blocks
    per_width = (4 if architecture.gated else 2) * item
    feed_forward = per_width * (
        sizes.expert_tokens * sizes.width if architecture.experts else sizes.tokens * sizes.width
    )
    feed_forward += per_width * sizes.tokens * sizes.shared_width
    feed_forward *= architecture.feed_forward_blocks
    scores = 0.0
    if not workload.flash_attention:
        per_score = 2 * item + 1 if architecture.attention_dropout else item
        scores = architecture.attention_blocks * sizes.sequences * sizes.heads * sizes.queries * sizes.keys * per_score
    whole = stream + heads + feed_forward + scores
    if parallel.recompute is None:
        return whole, whole
    if parallel.recompute == "selective":
        return whole - scores, whole
    ratio = 1.0 if parallel.recompute == "full" else float(parallel.recompute)
    return ratio * sizes.residual_tokens * hidden * item + (1 - ratio) * whole, whole


def head_activations(workload: Workload, layout: Layout) -> float:
    """Bytes of the logits that a rank has, and of their softmax and gradient, which the loss makes in float32."""
    vocabulary = math.ceil(workload.architecture.vocabulary / layout.parallel.tensor_parallel_size)
    sizes = Sizes.of(workload, layout)
    tokens = sizes.sequences if workload.architecture.patch_width else sizes.tokens
    return float(tokens * vocabulary * (sizes.itemsize + 4))


def _shards(workload: Workload, layout: Layout) -> tuple[int, int]:
    """Over how many ranks weights and gradients are cut, and over how many the states of the optimizer."""
    parallel = layout.parallel
    if layout.partition_ranks is not None:
        return layout.partition_ranks, layout.partition_ranks
    return 1, (layout.data_parallel_size(workload) * parallel.context_parallel_size if parallel.zero_1 else 1)


def _buffers(workload: Workload, layout: Layout, layer: float, shards: int) -> float:
    """Two buckets of gradients, two gathered activations, and with MiCS two layers with their gradients."""
    sizes = Sizes.of(workload, layout)
    gathered = 2 * sizes.tokens * workload.architecture.hidden * sizes.itemsize
    size = 2 * BUCKET_BYTES + (gathered if layout.parallel.tensor_parallel_size > 1 else 0)
    return size + (2 * layer * (workload.weight_bytes + workload.gradient_bytes) if shards > 1 else 0)
