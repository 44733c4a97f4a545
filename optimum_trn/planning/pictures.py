"""What a plan looks like: its report page, and what the engines of its cores do as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.planning.planner import Plan
from optimum_trn.planning.search import Candidate, deciding_term, training_arguments
from optimum_trn.planning.step import StepEstimate, estimate_step, transfer_seconds
from optimum_trn.planning.timeline import Span as Played
from optimum_trn.planning.timeline import timeline
from optimum_trn.planning.workload import Workload
from optimum_trn.report import Curve, Memory, Report, Slice, Span, Table

STATUS = "Predicted by a cost model; nothing on this page was measured."

PLAYED = 4
"""Micro-batches for each rank of a pipeline that are shown; the rest of a longer step is like them."""

CONSTANT = ("weights", "gradients", "optimizer", "collective buffers", "code")
"""Categories of memory that last as long as the step."""

LAYOUT_COLUMNS = ("layout", "step, s", "MFU", "tokens/s", "HBM, GiB", "dollars/B tokens", "against the best")
"""What is said of a layout, on the page and in the terminal."""

LAYERS_SHOWN = 12
"""Points of a forward pass at which memory is shown where there is no pipeline."""


def report(plan: Plan) -> Report:
    """The page of a plan."""
    work, chosen = plan.workload, plan.chosen
    step, memory = chosen.step, chosen.memory
    hours, dollars = plan.hours(chosen), plan.dollars(chosen)
    facts = {
        "model": f"{work.architecture.model_type}, {work.architecture.parameters / 1e9:.2f}B parameters",
        "cluster": f"{work.nodes} x {work.machine.name}, {work.world_size} ranks",
        "batch": f"{work.global_batch} x {work.sequence_length} tokens, {work.precision}, {work.optimizer}",
        "layout": str(chosen.layout),
        "step": f"{step.seconds:.3f} s",
        "MFU": f"{step.mfu:.1%}",
        "tokens/s": f"{step.tokens_per_second:,.0f}",
        "HBM of the fullest core": f"{memory.total / 2**30:.1f} of {memory.capacity / 2**30:g} GiB",
    }
    if plan.price is not None:
        facts["price"] = str(plan.price)
    if hours is not None and plan.tokens is not None:
        facts[f"{plan.tokens:,.0f} tokens"] = f"{hours / 24:,.1f} days" + (f", {dollars:,.0f} dollars" * bool(dollars))
    for reason, count in plan.result.reasons.most_common(4):
        facts[f"layouts that fell: {count}"] = reason
    arguments = ", ".join(f"{name}={value!r}" for name, value in training_arguments(work, chosen.layout).items())
    return Report(
        title=f"{work.architecture.model_type} on {work.nodes} x {work.machine.name}",
        status=STATUS,
        facts=facts,
        memory=memory_over_time(plan),
        step=step.parts,
        pipeline=[
            [Span(s.start, s.end, s.action.kind, f"micro-batch {s.action.micro_batch}") for s in spans]
            for spans in played(work, chosen)
        ]
        if chosen.layout.parallel.pipeline_parallel_size > 1
        else [],
        layouts=_layouts(plan),
        scaling=scaling(work, chosen),
        arguments=f"NeuronTrainingArguments({arguments})",
    )


def played(workload: Workload, candidate: Candidate) -> list[list[Played]]:
    """The spans of every rank of the pipeline, of at most `PLAYED` micro-batches for each rank."""
    parallel, step = candidate.layout.parallel, candidate.step
    ranks = parallel.pipeline_parallel_size
    count = min(candidate.layout.micro_batches(workload), PLAYED * ranks)
    forward, backward = [s[0] for s in step.stages], [s[1] for s in step.stages]
    transfer = transfer_seconds(workload, candidate.layout)
    if ranks == 1:
        return timeline("gpipe", 1, 1, [sum(forward)], [sum(backward)], transfer)
    return timeline(parallel.pipeline_schedule, ranks, count, forward, backward, transfer)


def memory_over_time(plan: Plan) -> Memory:
    """HBM of the fullest core: what lasts, and activations by the micro-batches that are under way."""
    chosen, work = plan.chosen, plan.workload
    memory = chosen.memory
    points = list(_under_way(work, chosen))
    most = max(count for _, count in points) or 1.0
    end = points[-1][0]
    after = chosen.step.parts["gradient reduction"] + chosen.step.parts["optimizer"]
    times = [*(time for time, _ in points), end + after]
    counts = [*(count for _, count in points), 0.0]
    categories = {name: [memory.categories[name]] * len(times) for name in CONSTANT}
    categories["activations"] = [memory.categories["activations"] * count / most for count in counts]
    busy = [1.0 if time < end else 0.0 for time in times]
    categories["scratch"] = [memory.categories["scratch"] * now for now in busy]
    # The fullest moment has all of it: the last activation is there while its layer still runs.
    return Memory(f"core of stage {memory.rank}", times, categories, memory.capacity)


def _under_way(workload: Workload, candidate: Candidate) -> Iterator[tuple[float, float]]:
    """Times of the fullest rank, and how many micro-batches' activations it has from then on."""
    spans = played(workload, candidate)[candidate.memory.rank]
    yield 0.0, 0.0
    if len(spans) == 2:  # no pipeline: layer by layer
        forward, backward = spans
        for layer in range(LAYERS_SHOWN):
            yield forward.end * (layer + 1) / LAYERS_SHOWN, (layer + 1) / LAYERS_SHOWN
        for layer in range(LAYERS_SHOWN):
            length = (backward.end - backward.start) * (layer + 1) / LAYERS_SHOWN
            yield backward.start + length, 1 - (layer + 1) / LAYERS_SHOWN
        return
    held = 0
    for span in spans:
        if span.action.kind == "forward":
            held += 1
            yield span.start, float(held)
        elif span.action.kind != "input gradient":
            held -= 1
            yield span.end, float(held)


def scaling(workload: Workload, candidate: Candidate) -> Curve:
    """Tokens per second of each node at the same layout, where nodes and global batch grow together."""
    nodes, rates = [], []
    parallel = candidate.layout.parallel
    per_node = workload.global_batch / workload.nodes
    count = 1
    while count <= 4 * workload.nodes:
        batch = per_node * count
        work = replace(workload, nodes=count, global_batch=max(1, round(batch)))
        try:
            if batch == int(batch) and work.world_size % parallel.ranks_per_copy == 0:
                rates.append(estimate_step(work, candidate.layout).tokens_per_second / count)
                nodes.append(count)
        except (MeshError, PlanError):
            pass  # too few nodes for this layout: the curve begins later
        count *= 2
    return Curve("nodes, the global batch growing with them", nodes, {"tokens/s of a node": rates}, "tokens/s")


def _layouts(plan: Plan) -> Table:
    best = plan.result.best
    shown = best if plan.chosen in best else [*best, plan.chosen]
    return Table(LAYOUT_COLUMNS, [layout_row(plan, candidate) for candidate in shown], shown.index(plan.chosen))


def layout_row(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    """A layout of a plan in the columns of `LAYOUT_COLUMNS`."""
    dollars, step = plan.dollars_per_billion_tokens(candidate), candidate.step
    slower = step.seconds / plan.best.step.seconds - 1
    return (
        str(candidate.layout),
        f"{step.seconds:.3f}",
        f"{step.mfu:.1%}",
        f"{step.tokens_per_second:,.0f}",
        f"{candidate.memory.total / 2**30:.1f}",
        "no price" if dollars is None else f"{dollars:,.2f}",
        "best" if candidate is plan.best else f"+{slower:.1%}: {deciding_term(step, plan.best.step)}",
    )


def engine_slices(plan: Plan) -> Iterator[Slice]:
    """What each engine of a core of every stage does: each pass at the engine's share of such a pass.

    Engines of one pass start together; how they take turns inside it is not modelled.
    """
    work, chosen = plan.workload, plan.chosen
    shares = engine_shares(chosen.step)
    end = 0.0
    for rank, spans in enumerate(played(work, chosen)):
        core = f"stage {rank}, predicted"
        for span in spans:
            for engine, share in shares.items():
                if share > 0:
                    name = f"{span.action.kind} {span.action.micro_batch}"
                    yield Slice(core, engine, name, span.start, (span.end - span.start) * share)
            end = max(end, span.end)
    parts = chosen.step.parts
    for rank in range(chosen.layout.parallel.pipeline_parallel_size):
        core = f"stage {rank}, predicted"
        yield Slice(core, "collectives", "gradient reduction", end, parts["gradient reduction"])
        yield Slice(core, "vector", "optimizer", end + parts["gradient reduction"], parts["optimizer"])


def engine_shares(step: StepEstimate) -> dict[str, float]:
    """Of the time of a pass, what each engine is busy."""
    busy = step.parts["compute"] + step.parts["collectives in layers"] + step.parts["launches"]
    engines = step.engines
    found = {"matrix": engines.matrix, "vector": engines.vector, "DMA": engines.memory}
    found["collectives"] = step.parts["collectives in layers"]
    return {name: min(1.0, seconds / busy) for name, seconds in found.items()}
