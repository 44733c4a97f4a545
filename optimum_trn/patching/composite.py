"""Plans of composite models, such as vision-language models: every tower by the plan of its own model type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.patching.infer import infer_plan
from optimum_trn.patching.marks import Tower
from optimum_trn.patching.plan import ModelPlan, record_head
from optimum_trn.patching.registry import find_plan
from optimum_trn.patching.schedule import Schedule


@dataclass(frozen=True)
class CompositePlan:
    """How a model is sharded whose config has configs of other models within it.

    `towers` are the plans of those of them that have one, by the model types of their configs; a tower is a
    transformers model within the model whose config has such a type.  What lies outside of the towers, such as the
    projection of images into the space of the text, and every tower without a plan stay whole on all ranks.
    """

    model_type: str
    towers: Mapping[str, ModelPlan]

    @property
    def unproven(self) -> dict[str, str]:
        """The parts that inferred plans of towers leave whole, and why."""
        return {
            f"{model_type}: {path}": reason
            for model_type, plan in self.towers.items()
            for path, reason in plan.unproven.items()
        }

    def validate(self, config: Any, tensor_parallel_size: int) -> None:
        """Raises `PlanError` for a tower that has fewer parts than there are ranks."""
        for part in _configs_within(config):
            if part.model_type in self.towers:
                self.towers[part.model_type].validate(part, tensor_parallel_size)

    def record(self, schedule: Schedule) -> None:
        """Records the plan of each tower, and the heads; `PlanError` if the model has none of the towers."""
        recorded: list[str] = []
        for path, tower in schedule.model.named_modules():
            if not path or not isinstance(tower, PreTrainedModel) or tower.config.model_type not in self.towers:
                continue
            if not any(path.startswith(f"{outer}.") for outer in recorded):
                self.towers[tower.config.model_type].record_layers(schedule, path)
                schedule[path].replace(Tower())
                recorded.append(path)
        if not recorded:
            raise PlanError(
                f"{type(schedule.model).__name__} has none of the towers {sorted(self.towers)} of its config."
            )
        heads: list[nn.Module] = []
        for path, model in schedule.model.named_modules():  # a model around a tower often has the head as its own
            around = any(f"{tower}.".startswith(f"{path}." if path else "") for tower in recorded)
            if not isinstance(model, PreTrainedModel) or not around:
                continue
            head = model.get_output_embeddings()
            if head is not None and not any(head is other for other in heads):
                heads.append(head)
                record_head(schedule, path)

    def record_sequence(self, schedule: Schedule) -> None:
        """Sequence parallelism needs one stack of layers with one sequence."""
        raise PlanError(
            f"{self.model_type}: sequence_parallel=True is for decoders, one stack of causal layers; this model has "
            "several towers. Leave it off."
        )


def plan_for(config: Any, model_class: type[PreTrainedModel] | None = None) -> ModelPlan | CompositePlan:
    """The plan of a config's model type, or one made of those of the configs within it, or one that is inferred.

    The text tower of a composite must have a plan, declared or inferred, since that is where most parameters are; if it
    cannot be inferred alone, that of `model_class` as a whole may be.  `UnsupportedModelError` if nothing is proven.
    """
    plan = find_plan(config.model_type)
    if plan is not None:
        return plan
    declared = ((part.model_type, find_plan(part.model_type)) for part in _configs_within(config))
    towers = {model_type: plan for model_type, plan in declared if plan is not None}
    text_config = config.get_text_config(decoder=True)
    try:
        if text_config.model_type == config.model_type:
            return infer_plan(config, model_class)
        if text_config.model_type not in towers:
            towers[text_config.model_type] = infer_plan(text_config)
    except UnsupportedModelError:
        if text_config.model_type != config.model_type:
            return infer_plan(config, model_class)
        if not towers:
            raise
    return CompositePlan(config.model_type, towers)


def _configs_within(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configs within a config, outer ones first."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield part
            yield from _configs_within(part)
