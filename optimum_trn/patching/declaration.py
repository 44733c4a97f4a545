"""Inferred plans as text: Python source that a person can commit under models/, and JSON for the cache."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

from optimum_trn.patching.blocks.region import Region
from optimum_trn.patching.plan import ModelPlan, Stack


def declaration(plan: ModelPlan) -> str:
    """The source of a file under models/ that registers `plan`."""
    stacks = ",\n".join(_stack(stack) for stack in plan.stacks)
    options = "".join(f"        {name}={getattr(plan, name)!r},\n" for name in ("head",) if not getattr(plan, name))
    return (
        "from optimum_trn.patching import ModelPlan, Region, Stack, register_plan\n\n"
        "register_plan(\n"
        "    ModelPlan(\n"
        f"        {plan.model_type!r},\n"
        f"        embedding={plan.embedding!r},\n"
        f"        stacks=(\n{stacks},\n        ),\n"
        f"{options}"
        "    )\n"
        ")\n"
    )


def _stack(stack: Stack) -> str:
    regions = ",\n".join(f"                {_region(region)}" for region in stack.roles)
    return f"            Stack(\n                {stack.layers!r},\n{regions},\n            )"


def _region(region: Any) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in _told(region).items())
    return f"Region({shown})"


def _told(region: Any) -> dict[str, Any]:
    """The fields of a region that are not what they are by default."""
    told = {}
    for one in fields(region):
        value = getattr(region, one.name)
        usual = one.default if one.default is not MISSING else ({} if one.default_factory is not MISSING else MISSING)
        if usual is MISSING or value != usual:
            told[one.name] = value
    return told


def to_json(plan: ModelPlan) -> str:
    """A plan of regions, as text."""
    return json.dumps(
        {
            "model_type": plan.model_type,
            "embedding": plan.embedding,
            "head": plan.head,
            "unproven": dict(plan.unproven),
            "stacks": [
                {"layers": stack.layers, "regions": [_told(role) for role in stack.roles]} for stack in plan.stacks
            ],
        },
        indent=1,
    )


def from_json(text: str) -> ModelPlan:
    """The plan that `to_json` wrote."""
    data = json.loads(text)
    return ModelPlan(
        data["model_type"],
        embedding=tuple(data["embedding"]),
        stacks=tuple(
            Stack(stack["layers"], *(Region(**_frozen(region)) for region in stack["regions"]))
            for stack in data["stacks"]
        ),
        head=data["head"],
        unproven=data["unproven"],
    )


def _frozen(value: Any) -> Any:
    """Lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
