"""Patching: applies the registered plan of a stock transformers model to one instance of it, and takes it back."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from optimum_trn.errors import MeshError, PlanError
from optimum_trn.parallel.mesh import TENSOR_AXIS, ParallelConfig, pipeline_size
from optimum_trn.patching.adapters import adapters_aside, put_back
from optimum_trn.patching.composite import CompositePlan, plan_for
from optimum_trn.patching.cutting import place_parameters
from optimum_trn.patching.engine import install, uninstall
from optimum_trn.patching.fusion import record_fusion
from optimum_trn.patching.infer import infer_plan
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.stage_plan import record_stages, validate_stages
from optimum_trn.patching.state import PatchReport, state_of, with_unproven


def patch_model(model: PreTrainedModel, parallel_config: ParallelConfig, mesh: DeviceMesh | None = None) -> PatchReport:
    """Makes a stock transformers model tensor-parallel, in place: on this rank only its own shards are left.

    Works on real weights, whose full storage is freed parameter by parameter, and on the meta device.  Without `mesh`,
    one is built over all ranks.  PEFT may have wrapped its layers; a `PeftModel` itself is patched by its
    `get_base_model()`.  The model is as it was when this raises: `MeshError` (degrees and world size),
    `PlanError` (sizes that do not divide, modules that the plan does not fit, a patched model) or
    `UnsupportedModelError`.
    """
    if state_of(model) is not None:
        raise PlanError(f"{type(model).__name__} is patched already. Call unpatch_model first.")
    size = parallel_config.tensor_parallel_size
    if mesh is None:
        mesh = parallel_config.build_mesh()
    elif mesh[TENSOR_AXIS].size() != size:
        raise MeshError(f"tensor_parallel_size is {size}, but the mesh has {mesh[TENSOR_AXIS].size()} such ranks.")
    stages = parallel_config.num_stages
    if pipeline_size(mesh) != parallel_config.pipeline_parallel_size:
        raise MeshError(
            f"pipeline_parallel_size is {parallel_config.pipeline_parallel_size}, but the mesh has "
            f"{pipeline_size(mesh)} such ranks."
        )
    fuses = parallel_config.fuse_qkv or parallel_config.fuse_gate_up
    if size == 1 and stages == 1 and not fuses:
        return install(model, (), parallel_config, mesh).report
    plan = plan_for(model.config, type(model))
    if isinstance(plan, CompositePlan) and size > 1 and not _fits(plan, model, mesh, parallel_config):
        plan = infer_plan(model.config, type(model))
    plan.validate(model.config, size)
    validate_stages(plan, model.config, stages)
    wrappers: dict[str, Any] = {}
    try:
        with adapters_aside(model) as wrappers:
            schedule = Schedule(model, mesh, parallel_config)
            if size > 1:
                plan.record(schedule)
            if stages > 1:
                record_stages(plan, schedule, stages)
            if parallel_config.sequence_parallel:
                plan.record_sequence(schedule)
            if fuses:
                record_fusion(plan, schedule, parallel_config)
            schedule.apply()
            return with_unproven(model, plan.unproven)
    except PlanError:
        if state_of(model) is not None:  # an adapter was refused
            with adapters_aside(model):
                uninstall(model)
            put_back(model, wrappers)
        raise


def _fits(plan: CompositePlan, model: PreTrainedModel, mesh: DeviceMesh | None, config: ParallelConfig) -> bool:
    """Whether the declarations of the towers are right for this class, which may have parts of them, or tie them."""
    assert mesh is not None
    schedule = Schedule(model, mesh, config)
    try:
        with adapters_aside(model):
            plan.record(schedule)
            place_parameters(model, schedule.check(), config.tensor_parallel_size)
    except PlanError:
        return False
    return True


def unpatch_model(model: PreTrainedModel) -> None:
    """Makes a patched model stock again, with the current full weights on every rank.

    A collective over the tensor-parallel ranks: all of them must call it.  `PlanError` if the model is not patched.
    """
    uninstall(model)
