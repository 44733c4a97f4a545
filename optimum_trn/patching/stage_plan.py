"""Where the plan of a model type lets its layers be cut into pipeline stages, by what each of them costs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.patching.balance import balanced_ends, cost
from optimum_trn.patching.composite import CompositePlan
from optimum_trn.patching.elsewhere import Side
from optimum_trn.patching.marks import BesideLayers
from optimum_trn.patching.plan import ModelPlan, base_model_prefix
from optimum_trn.patching.schedule import Schedule
from optimum_trn.patching.stage_map import modules_beside


def validate_stages(plan: ModelPlan | CompositePlan, config: Any, num_stages: int) -> None:
    """Raises `PlanError` for more stages than layers, and `UnsupportedModelError` for models without a pipeline cut."""
    if num_stages == 1:
        return
    stacks = () if isinstance(plan, CompositePlan) else plan.every_stack()
    # An encoder, and the decoder that follows it, are one chain of layers.
    if not 1 <= len(stacks) <= 2 or len({stack.layers.replace("encoder", "decoder") for stack in stacks}) > 1:
        raise UnsupportedModelError(
            f"{plan.model_type} has several stacks of layers that do not follow each other, which are not cut into "
            "pipeline stages. Set pipeline_parallel_size=1."
        )
    if any("*" in stack.layers for stack in stacks) or (isinstance(plan, ModelPlan) and plan.shares_layers):
        raise UnsupportedModelError(
            f"{plan.model_type} uses the same weights in several layers, so that no stage can have them alone. "
            "Set pipeline_parallel_size=1."
        )
    both = len(stacks) == 2 and config.is_encoder_decoder
    layers = _num_layers(stacks[0].config_of(config), both)
    if num_stages > layers:
        raise PlanError(
            f"{plan.model_type}: {layers} layers cannot make {num_stages} pipeline stages; {layers} is the most. "
            "Lower pipeline_parallel_size, or take a schedule with one stage a rank."
        )


def _num_layers(config: Any, both: bool) -> int:
    """The layers of one stack, or of an encoder and a decoder together."""
    names = ("num_decoder_layers", "decoder_layers") if both else ()
    return config.num_hidden_layers + sum(getattr(config, name, 0) or 0 for name in names)


def record_stages(plan: ModelPlan | CompositePlan, schedule: Schedule, num_stages: int) -> None:
    """Records a cut into `num_stages` whose most expensive stage costs least."""
    ends, beside = stage_ends(plan, schedule.model, num_stages)
    for path, side in beside.items():
        schedule[path].replace(BesideLayers(side))
    for path in ends:
        schedule[path].cut_pipeline_stage()


def stage_ends(
    plan: ModelPlan | CompositePlan, model: PreTrainedModel, num_stages: int
) -> tuple[list[str], dict[str, Side]]:
    """The last layers of all stages but the last, and what the plan says of the modules beside the layers."""
    validate_stages(plan, model.config, num_stages)
    assert isinstance(plan, ModelPlan)
    prefix = base_model_prefix(model)
    modules = dict(model.named_modules())
    beside = {prefix + name: side for name, side in plan.beside_layers.items() if prefix + name in modules}
    stacks = [stack for stack in plan.every_stack() if prefix + stack.layers in modules]
    paths = [prefix + stack.layers for stack in stacks]
    outside = {"before": 0.0, "after": 0.0}
    for path, (side, stack) in modules_beside(model, paths, beside).items():
        if (side, stack) in (("before", 0), ("after", len(stacks) - 1)):  # of what is in between, none costs much
            outside[side] += cost_outside(model, modules[path], model.config)
    layers = [f"{path}.{name}" for path in paths for name, _ in modules[path].named_children()]
    configs = {path: stack.config_of(model.config) for path, stack in zip(paths, stacks, strict=True)}
    costs = [cost(modules[layer], configs[layer.rpartition(".")[0]]) for layer in layers]
    return [layers[end] for end in balanced_ends(costs, num_stages, outside["before"], outside["after"])], beside


def cost_outside(model: PreTrainedModel, module: nn.Module, config: Any) -> float:
    """Of a module beside the layers; the head multiplies with all of its weight, also where it is tied to a table."""
    head = model.get_output_embeddings()
    return cost(module, config) if module is not head or head is None else float(head.get_parameter("weight").numel())
