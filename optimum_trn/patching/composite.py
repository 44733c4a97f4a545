"""Plans of composite models, such as vision-language models: every tower by the plan of its own model type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from optimum_trn.errors import PlanError
from optimum_trn.patching.infer import infer_plan
from optimum_trn.patching.plan import ModelPlan, record_head
from optimum_trn.patching.registry import find_plan
from optimum_trn.patching.schedule import Schedule


@dataclass(frozen=True)
class CompositePlan:
    """How a model is sharded whose config has configs of other models within it.

    `towers` are the plans of those of them that have one, with the names of their configs; a tower is a transformers
    model within the model whose config has the type of such a plan.  What lies outside of the towers, such as the
    projection of images into the space of the text, and every tower without a plan stay whole on all ranks.
    """

    model_type: str
    towers: tuple[ModelPlan, ...]

    def validate(self, config: Any, tensor_parallel_size: int) -> None:
        """Raises `PlanError` for a tower that has fewer parts than there are ranks."""
        for plan, tower_config in _planned(config):
            plan.validate(tower_config, tensor_parallel_size)

    def record(self, schedule: Schedule) -> None:
        """Records the plan of each tower, and the head; `PlanError` if the model has none of the towers."""
        plans = {plan.model_type: plan for plan in self.towers}
        recorded: list[str] = []
        for path, tower in schedule.model.named_modules():
            if not path or not isinstance(tower, PreTrainedModel) or tower.config.model_type not in plans:
                continue
            if not any(path.startswith(f"{outer}.") for outer in recorded):
                plans[tower.config.model_type].record_layers(schedule, path)
                recorded.append(path)
        if not recorded:
            raise PlanError(f"{type(schedule.model).__name__} has none of the towers {sorted(plans)} of its config.")
        heads = []
        for path in ("", *recorded):  # the model often has the head of a tower as its own
            head = schedule.model.get_submodule(path).get_output_embeddings()
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

    The text tower of a composite must have a plan, which is where most parameters are; else, and without any plan, one
    is inferred and proven for `model_class`.  `UnsupportedModelError` if nothing of it can be proven.
    """
    plan = find_plan(config.model_type)
    if plan is not None:
        return plan
    towers = {plan.model_type: plan for plan, _ in _planned(config)}
    text_config = config.get_text_config(decoder=True)
    if not towers or (text_config.model_type != config.model_type and find_plan(text_config.model_type) is None):
        return infer_plan(config, model_class)
    return CompositePlan(config.model_type, tuple(towers.values()))


def _planned(config: Any) -> Iterator[tuple[ModelPlan, Any]]:
    """The outermost configs within a config whose model types have plans."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if not isinstance(part, PreTrainedConfig):
            continue
        plan = find_plan(part.model_type)
        if plan is None:
            yield from _planned(part)
        else:
            yield plan, part
