"""Plans: how the models of one type are sharded, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimum_trn.errors import PlanError
from optimum_trn.patching.blocks import Role, column_wise
from optimum_trn.patching.schedule import Schedule


@dataclass(frozen=True)
class ModelPlan:
    """How models of `model_type` (that of their config) are sharded.

    `layers` and `embedding` are paths within the base model, so that one plan serves it under every head; `lm_head` is
    a path within the whole model and concerns only the classes that have output embeddings.
    """

    model_type: str
    attention: Role
    mlp: Role
    layers: str = "layers"
    embedding: str = "embed_tokens"
    lm_head: str = "lm_head"

    def sizes(self, config: Any) -> Mapping[str, int]:
        """Every number that the tensor-parallel size must divide, by its name in the config."""
        return {**self.attention.sizes(config), **self.mlp.sizes(config), "vocab_size": config.vocab_size}

    def validate(self, config: Any, tensor_parallel_size: int) -> None:
        """Raises one `PlanError` that names all numbers which `tensor_parallel_size` does not divide."""
        sizes = self.sizes(config)
        misfits = {name: size for name, size in sizes.items() if size % tensor_parallel_size}
        if misfits:
            common = math.gcd(*sizes.values())
            legal = [size for size in range(1, common + 1) if common % size == 0]
            raise PlanError(
                f"{self.model_type}: tensor_parallel_size {tensor_parallel_size} does not divide "
                + " and ".join(f"{name} {size}" for name, size in misfits.items())
                + f". This model takes tensor_parallel_size {', '.join(map(str, legal))}."
            )

    def record(self, schedule: Schedule) -> None:
        """Records the plan for the model of `schedule`; `PlanError` where a path of the plan does not exist."""
        prefix = base_model_prefix(schedule.model)
        schedule[prefix + self.embedding].shard("weight", 0).sync("output", "all_reduce")
        layers = schedule[f"{prefix}{self.layers}.*"]
        for role in (self.attention, self.mlp):
            role.record(layers)
        if schedule.model.get_output_embeddings() is not None:
            head = schedule[self.lm_head]
            column_wise(head)
            head.sync("input gradient", "all_reduce").sync("output", "all_gather")


def base_model_prefix(model: nn.Module) -> str:
    """The path of the base model within a transformers model, with a trailing dot; empty if it is the base model."""
    base = model.base_model
    return next((f"{name}." if name else "" for name, module in model.named_modules() if module is base), "")
