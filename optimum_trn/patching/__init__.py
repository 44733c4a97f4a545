"""The patching engine: plans as data, applied to instances of stock models."""

from optimum_trn.patching.apply import patch_model, unpatch_model
from optimum_trn.patching.blocks import MLP, Attention, GatedMLP
from optimum_trn.patching.plan import ModelPlan
from optimum_trn.patching.registry import get_plan, register_plan, supported_models
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.state import PatchReport, PatchState, state_of

__all__ = [
    "MLP",
    "Attention",
    "GatedMLP",
    "ModelPlan",
    "PatchReport",
    "PatchState",
    "Schedule",
    "get_plan",
    "patch_model",
    "register_plan",
    "state_of",
    "supported_models",
    "unpatch_model",
]
