"""The registry of plans, by the model type of the transformers config."""

from __future__ import annotations

import importlib

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.patching.plan import ModelPlan

_PLANS: dict[str, ModelPlan] = {}


def register_plan(plan: ModelPlan) -> ModelPlan:
    """Adds a plan and returns it; `PlanError` if its model type has one already."""
    if plan.model_type in _PLANS:
        raise PlanError(f"A plan for model type {plan.model_type!r} is registered already.")
    _PLANS[plan.model_type] = plan
    return plan


def find_plan(model_type: str) -> ModelPlan | None:
    """The plan of a model type, if there is one."""
    _load_declarations()
    return _PLANS.get(model_type)


def get_plan(model_type: str) -> ModelPlan:
    """The plan of a model type; `UnsupportedModelError` if there is none."""
    plan = find_plan(model_type)
    if plan is None:
        raise UnsupportedModelError(
            f"No plan for model type {model_type!r}, so it cannot be tensor-parallel. Supported: "
            f"{', '.join(supported_models())}. Use tensor_parallel_size=1, or declare the family with register_plan."
        )
    return plan


def supported_models() -> list[str]:
    """The model types that have a plan, in alphabetical order."""
    _load_declarations()
    return sorted(_PLANS)


def _load_declarations() -> None:
    # On first use and by name: the families stand above the engine and import it.
    importlib.import_module("optimum_trn.models")
