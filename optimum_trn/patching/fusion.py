"""Which separate projections of a plan's roles read the same input, so that one product can make all of them."""

from __future__ import annotations

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import ParallelConfig
from optimum_trn.patching.blocks import Attention, Experts, GatedMLP, OneOf, Role, Where
from optimum_trn.patching.blocks.role import parent, present
from optimum_trn.patching.composite import CompositePlan
from optimum_trn.patching.plan import ModelPlan, base_model_prefix
from optimum_trn.patching.schedule import Schedule

WHAT = {
    "fuse_qkv": "query, key and value projections of its own for attention",
    "fuse_gate_up": "gate and up projections of its own for its MLP",
}
"""By the field of `ParallelConfig`: what a model must have for it."""


def fusable(role: Role) -> dict[str, list[tuple[str, ...]]]:
    """By field of `ParallelConfig`, the linears of a role that read one input, by path within the layer."""
    found: dict[str, list[tuple[str, ...]]] = {field: [] for field in WHAT}
    if isinstance(role, Attention):
        # A cross-attention makes queries of the tokens, but keys and values of the memory.
        found["fuse_qkv"].append((role.q, role.k, role.v) if role.memory is None else (role.k, role.v))
    elif isinstance(role, GatedMLP):
        found["fuse_gate_up"].append((role.gate, role.up))
    inner: tuple[Role | None, ...] = ()
    if isinstance(role, OneOf):
        inner = role.roles
    elif isinstance(role, (Where, Experts)):
        inner = (role.role if isinstance(role, Where) else role.shared,)
    for other in inner:
        for field, groups in (fusable(other) if other is not None else {}).items():
            found[field] += groups
    return found


def record_fusion(plan: ModelPlan | CompositePlan, schedule: Schedule, config: ParallelConfig) -> None:
    """Records what `fuse_qkv` and `fuse_gate_up` ask for; `PlanError` if the model has nothing of the kind."""
    if isinstance(plan, CompositePlan):
        raise PlanError(
            f"{plan.model_type} is made of several models: fuse_qkv and fuse_gate_up are for one. Leave them off."
        )
    prefix = base_model_prefix(schedule.model)
    for field, what in WHAT.items():
        if not getattr(config, field):
            continue
        fused = 0
        for stack in plan.every_stack():
            path = f"{prefix}{stack.layers}.*"
            if not schedule.find(path):
                continue
            for linears in dict.fromkeys(group for role in stack.roles for group in fusable(role)[field]):
                region = parent(linears)
                names = [linear.removeprefix(f"{region}.") for linear in linears]
                for layers in present(schedule[path], *linears):
                    (layers[region] if region else layers).fuse(*names)
                    fused += 1
        if not fused:
            raise PlanError(f"{plan.model_type} has no {what}: there is nothing to fuse. Leave {field} off.")
