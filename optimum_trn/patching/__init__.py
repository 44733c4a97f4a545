"""The patching engine: plans as data, applied to instances of stock models."""

from optimum_trn.patching.apply import patch_model, unpatch_model
from optimum_trn.patching.autotune import Space
from optimum_trn.patching.blocks import (
    MLP,
    Attention,
    Experts,
    FusedAttention,
    FusedGatedMLP,
    GatedMLP,
    LatentAttention,
    OneOf,
    Region,
    Where,
)
from optimum_trn.patching.composite import CompositePlan, plan_for
from optimum_trn.patching.declaration import declaration
from optimum_trn.patching.infer import infer_plan
from optimum_trn.patching.marks import annotations_of, stages_of
from optimum_trn.patching.pipelined import PipelinedModel
from optimum_trn.patching.plan import ModelPlan, Stack
from optimum_trn.patching.registry import get_plan, register_plan, supported_models
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.state import PatchReport, PatchState, pipeline_of, state_of

__all__ = [
    "MLP",
    "Attention",
    "CompositePlan",
    "Experts",
    "FusedAttention",
    "FusedGatedMLP",
    "GatedMLP",
    "LatentAttention",
    "ModelPlan",
    "OneOf",
    "PatchReport",
    "PatchState",
    "PipelinedModel",
    "Region",
    "Schedule",
    "Space",
    "Stack",
    "Where",
    "annotations_of",
    "declaration",
    "get_plan",
    "infer_plan",
    "patch_model",
    "pipeline_of",
    "plan_for",
    "register_plan",
    "stages_of",
    "state_of",
    "supported_models",
    "unpatch_model",
]
