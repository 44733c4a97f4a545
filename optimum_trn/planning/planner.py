"""A plan: the best layouts of a model on a cluster, what they take and what they cost, as a Python API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from optimum_trn.cost import Price, get_machine, get_price
from optimum_trn.cost.cores import Precision
from optimum_trn.errors import PlanError
from optimum_trn.planning.architecture import architecture_of
from optimum_trn.planning.search import (
    Candidate,
    SearchResult,
    deciding_term,
    layouts,
    search,
    training_arguments,
)
from optimum_trn.planning.workload import Layout, OptimizerName, Workload

LAYOUT_KEYS = {
    "tp": "tensor_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel_size",
    "schedule": "pipeline_schedule",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "zero_1": "zero_1",
    "offload": "optimizer_offload",
    "mics": "mics_partition_size",
    "recompute": "recompute",
}
"""Short names of ParallelConfig's fields; besides, `dp` is what is left of the world and `mb` the micro-batch."""


@dataclass(frozen=True)
class Plan:
    """Layouts of a workload, best first; `chosen` is that of the caller, if there is one, else the best.

    `comparison` is the plan of the same training on other instances.
    """

    workload: Workload
    result: SearchResult
    chosen: Candidate
    price: Price | None
    tokens: float | None = None
    budget: float | None = None
    comparison: Plan | None = None
    constraints: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """The fastest of all layouts that fit."""
        return self.result.best[0]

    def hours(self, candidate: Candidate) -> float | None:
        """For all tokens; None where the caller did not say how many."""
        return None if self.tokens is None else self.tokens / candidate.step.tokens_per_second / 3600

    def dollars(self, candidate: Candidate) -> float | None:
        """For all tokens on all nodes; None where the number of tokens or the price is not known."""
        hours = self.hours(candidate)
        return (
            None if hours is None or self.price is None else hours * self.price.dollars_per_hour * self.workload.nodes
        )

    def dollars_per_billion_tokens(self, candidate: Candidate) -> float | None:
        """On all nodes; None where no price is known."""
        if self.price is None:
            return None
        return self.price.dollars_per_hour * self.workload.nodes / 3600 / candidate.step.tokens_per_second * 1e9

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        work = self.workload
        result = {
            "kind": "prediction of a cost model, not a measurement",
            "instance": work.machine.name,
            "nodes": work.nodes,
            "ranks": work.world_size,
            "sequence_length": work.sequence_length,
            "global_batch": work.global_batch,
            "precision": work.precision,
            "optimizer": work.optimizer,
            "parameters": work.architecture.parameters,
            "price": vars(self.price) if self.price else None,
            "tokens": self.tokens,
            "budget": self.budget,
            "chosen": self._as_dict(self.chosen),
            "best": [self._as_dict(candidate) for candidate in self.result.best],
            "layouts_tried": self.result.tried,
            "rejected": dict(self.result.reasons.most_common()),
        }
        if self.comparison is not None:
            result["comparison"] = {**self.comparison.as_dict(), **compare(self)}
        return result

    def _as_dict(self, candidate: Candidate) -> dict[str, Any]:
        step, memory = candidate.step, candidate.memory
        hours, dollars = self.hours(candidate), self.dollars(candidate)
        return {
            "layout": str(candidate.layout),
            "training_arguments": training_arguments(self.workload, candidate.layout),
            "step_seconds": step.seconds,
            "parts_seconds": step.parts,
            "mfu": step.mfu,
            "sequences_per_second": step.sequences_per_second,
            "tokens_per_second": step.tokens_per_second,
            "hbm_bytes": memory.categories,
            "hbm_capacity": memory.capacity,
            "days": None if hours is None else hours / 24,
            "dollars": dollars,
            "within_budget": None if dollars is None or self.budget is None else dollars <= self.budget,
            "dollars_per_billion_tokens": self.dollars_per_billion_tokens(candidate),
            "slower_than_best": step.seconds / self.best.step.seconds - 1,
            "because_of": None if candidate is self.best else deciding_term(step, self.best.step),
        }


def plan(
    model: str | PretrainedConfig,
    *,
    instance: str,
    nodes: int,
    sequence_length: int,
    global_batch: int,
    layout: dict[str, Any] | None = None,
    precision: Precision = "autocast",
    optimizer: OptimizerName = "adamw",
    flash_attention: bool | None = None,
    tokens: float | None = None,
    budget: float | None = None,
    dollars_per_hour: float | None = None,
    compare_with: str | None = None,
    keep: int = 10,
) -> Plan:
    """Find the layouts of `model` (an id, a directory, a config.json or a config) on `nodes` instances.

    `layout` fixes some of `LAYOUT_KEYS`, `dp` and `mb`; the plan then says how much slower the best of those is than
    the best of all. Attention is computed in tiles on GPUs, and as published Trainium figures do, whole, unless
    `flash_attention` says otherwise. Raises `PlanError` where no layout fits, with what is missing.
    """
    machine = get_machine(instance)
    flash = machine.vendor == "nvidia" if flash_attention is None else flash_attention
    workload = Workload(
        architecture=architecture_of(read_config(model)),
        machine=machine,
        nodes=nodes,
        sequence_length=sequence_length,
        global_batch=global_batch,
        precision=precision,
        optimizer=optimizer,
        flash_attention=flash,
    )
    result = search(workload, keep=keep)
    if not result.best:
        raise PlanError(_nothing_fits(workload, result))
    chosen = result.best[0]
    if layout:
        of_kind = layouts(workload, optimizer_offload=bool(layout.get("offload")))
        matching = [found for found in of_kind if matches(found, layout, workload)]
        if not matching:
            raise PlanError(
                f"layout {_text(layout)}: no valid layout of {workload.world_size} ranks is like that. Degrees are "
                f"powers of two that divide {workload.world_size}, and dp is what tp, pp and cp leave of it."
            )
        own = search(workload, keep=1, among=matching)
        if not own.best:
            raise PlanError(f"layout {_text(layout)}: {_nothing_fits(workload, own)}")
        chosen = own.best[0]
    found = Plan(workload, result, chosen, get_price(instance, dollars_per_hour), tokens, budget, None, layout or {})
    if compare_with is None:
        return found
    other = plan(
        model,
        instance=compare_with,
        nodes=nodes,
        sequence_length=sequence_length,
        global_batch=global_batch,
        precision="autocast" if precision == "bf16_sr" else precision,
        optimizer=optimizer,
        tokens=tokens,
        budget=budget,
        keep=keep,
    )
    return replace(found, comparison=other)


def compare(plan: Plan) -> dict[str, float | None]:
    """Speed and cost of a plan against its comparison, on as many instances of each.

    `saving_at_equal_speed` is what the prices alone say.
    """
    other = plan.comparison
    assert other is not None
    speed = plan.chosen.step.tokens_per_second / other.chosen.step.tokens_per_second
    prices = None
    if plan.price is not None and other.price is not None:
        prices = plan.price.dollars_per_hour / other.price.dollars_per_hour
    return {
        "speed_ratio": speed,
        "price_ratio": prices,
        "saving_at_equal_speed": None if prices is None else 1 - prices,
        "saving": None if prices is None else 1 - prices / speed,
    }


def matches(layout: Layout, wanted: dict[str, Any], workload: Workload) -> bool:
    """Whether a layout has all that is wanted of it; `PlanError` for a name that does not exist."""
    for key, value in wanted.items():
        if key == "mb":
            own: Any = layout.micro_batch
        elif key == "dp":
            own = layout.data_parallel_size(workload)
        elif key in LAYOUT_KEYS:
            own = getattr(layout.parallel, LAYOUT_KEYS[key])
        else:
            raise PlanError(f"layout: {key!r} is none of {', '.join([*LAYOUT_KEYS, 'dp', 'mb'])}.")
        if own != value:
            return False
    return True


def read_config(model: str | PretrainedConfig) -> PretrainedConfig:
    """The config of a model id, a directory or a JSON file."""
    if isinstance(model, PretrainedConfig):
        return model
    path = Path(model)
    if path.is_file():
        fields = json.loads(path.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        raise PlanError(
            f"{model!r} is neither a model, a directory with a config.json nor such a file: {error}"
        ) from error


def _nothing_fits(workload: Workload, result: SearchResult) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in result.reasons.most_common(3))
    return (
        f"No layout of {workload.architecture.parameters / 1e9:.1f}B parameters fits {workload.nodes} x "
        f"{workload.machine.name} ({workload.machine.core.hbm_bytes / 2**30:g} GiB a core) with "
        f"{workload.sequence_length} tokens and a global batch of {workload.global_batch}: {result.tried} tried, "
        f"{reasons}. Take more nodes, a shorter sequence, or a global batch that the data-parallel ranks divide."
    )


def _text(layout: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in layout.items())
