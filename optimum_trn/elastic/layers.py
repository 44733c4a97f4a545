"""The layers of a model that this process has, with their optimizer state: taken over, handed on, and cut anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError, UnsupportedModelError
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.patching import ModelPlan, plan_for
from optimum_trn.patching.balance import cost
from optimum_trn.patching.pipelining import stacks_of
from optimum_trn.patching.plan import base_model_prefix
from optimum_trn.patching.stage_map import StageMap, map_stages
from optimum_trn.patching.stage_plan import cost_outside, stage_ends
from optimum_trn.patching.stages import StagedModel


def layer_map(model: PreTrainedModel) -> StageMap:
    """The modules of a whole model, each layer a stage of its own.

    Raises `UnsupportedModelError` or `PlanError` for models whose layers can't be cut.
    """
    plan = plan_for(model.config, type(model))
    if not isinstance(plan, ModelPlan):
        raise UnsupportedModelError(
            f"{plan.model_type} has several models in one, whose layers are not cut into pipeline stages. Leave "
            "fault_tolerance unset."
        )
    prefix = base_model_prefix(model)
    modules = dict(model.named_modules())
    stacks = [modules[prefix + stack.layers] for stack in plan.every_stack() if prefix + stack.layers in modules]
    count = sum(len(list(stack.children())) for stack in stacks)
    if count < 2:
        raise PlanError(f"{type(model).__name__} has {count} layer: nothing can be cut. Leave fault_tolerance unset.")
    ends, beside = stage_ends(plan, model, count)
    return map_stages(model, stacks_of(model, ends), ends, beside)


class Layers:
    """The model and the optimizer of one process, of which it holds some modules: the units that move.

    A unit is a layer, or a module with parameters beside the layers, by its path.  `held` are those whose weights and
    optimizer states are those of the last committed step.  Raises `PlanError` for optimizers that keep other tensors
    than the parameters of the model.
    """

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        self.model: Any = model
        self.optimizer = optimizer
        self.map = layer_map(model)
        self.device = next(model.parameters()).device
        self.held: set[str] = set(self.map.modules)
        self.staged: StagedModel | None = None
        named = dict(model.named_parameters(remove_duplicate=False))
        group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
        if not group_of.keys() <= {id(parameter) for parameter in named.values()}:
            raise PlanError(
                f"{type(optimizer).__name__} trains other tensors than the parameters of the model, such as float32 "
                "master weights: fault_tolerance can't move them. Load the model in float32 and set bf16=True, or set "
                "zero_1=False."
            )
        self._group_of = {name: group_of[id(p)] for name, p in named.items() if id(p) in group_of}
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.bytes = {path: _bytes(model.get_submodule(path)) for path in self.map.modules}

    @property
    def costs(self) -> list[float]:
        """What every layer costs, with the modules that are on its side of the stack; relative to each other."""
        layers = [path for stack in self.map.stacks for path in stack]
        found = [0.0] * len(layers)
        for path, at in self.map.modules.items():
            module = self.model.get_submodule(path)
            found[at] += (
                cost(module, self.model.config)
                if path in layers
                else cost_outside(self.model, module, self.model.config)
            )
        return found

    def names(self, paths: Iterable[str]) -> list[str]:
        """The trained parameters of some units, of tied ones the first name, in the order of the model."""
        wanted = set(paths)
        found = set()
        for name in self._group_of:
            if any(name.startswith(f"{path}.") for path in wanted):
                found.add(self.first_name(name))
        return [name for name in self.trained if name in found]

    def first_name(self, name: str) -> str:
        """The name under which a tied parameter is counted."""
        return self.map.aliases.get(name, (name,))[0]

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this process that has that name, or one that is tied to it."""
        for alias in self.map.aliases.get(name, (name,)):
            if any(alias.startswith(f"{path}.") for path in self.held):
                found: nn.Parameter = self.model.get_parameter(alias)
                return found
        raise KeyError(name)

    def state_of(self, path: str) -> dict[str, Any]:
        """A unit that is held: its parameters, buffers and optimizer states."""
        module = self.model.get_submodule(path)
        parameters = dict(module.named_parameters())
        states = {name: dict(self.optimizer.state.get(parameter, {})) for name, parameter in parameters.items()}
        return {"tensors": {**parameters, **dict(module.named_buffers())}, "optimizer": states}

    @torch.no_grad()
    def install(self, received: Mapping[str, Any], keep: Iterable[str]) -> None:
        """Take over the units that have come, let go of all but those to `keep`; the model is then not cut."""
        self.release()
        self.held = set(keep)
        states: dict[str, Any] = {}
        for path, state in received.items():
            module = self.model.get_submodule(path)
            tensors = dict([*module.named_parameters(), *module.named_buffers()])
            if any(tensor.is_meta for tensor in tensors.values()):
                module.to_empty(device=self.device)
                tensors = dict([*module.named_parameters(), *module.named_buffers()])
            for name, tensor in tensors.items():
                tensor.copy_(state["tensors"][name])
            states |= {f"{path}.{name}": own for name, own in state["optimizer"].items()}
        self._tie()
        self._give_to_optimizer(states)

    def cut(self, stages: StageMap, group: RankGroup) -> StagedModel:
        """Cut the model; the modules of the other stages are dropped."""
        self.staged = StagedModel(self.model, stages, group)
        return self.staged

    def release(self) -> None:
        """Have the stock modules back in their places, on the meta device where they are not held."""
        if self.staged is not None:
            self.staged.release()
            self.staged = None

    def _tie(self) -> None:
        for names in dict.fromkeys(self.map.aliases.values()):
            mine = [name for name in names if any(name.startswith(f"{path}.") for path in self.held)]
            for name in mine[1:]:
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[last] = self.model.get_parameter(mine[0])

    def _give_to_optimizer(self, states: Mapping[str, Any]) -> None:
        """The optimizer trains what is held, in the order of the model; `states` are those of what has come."""
        before = self.optimizer.state
        held = [name for name in self._group_of if any(name.startswith(f"{path}.") for path in self.held)]
        chosen: dict[int, tuple[nn.Parameter, int, Any]] = {}
        for name in held:
            parameter = self.model.get_parameter(name)
            state = states[name] if name in states else before.get(parameter, {})
            known = chosen.get(id(parameter))
            if known is None or not known[2]:
                chosen[id(parameter)] = parameter, self._group_of[name], state
        for place, group in enumerate(self.optimizer.param_groups):
            group["params"] = [parameter for parameter, at, _ in chosen.values() if at == place]
        before.clear()
        for parameter, _, state in chosen.values():
            if state:
                before[parameter] = {key: _placed(key, value, parameter) for key, value in state.items()}


def _placed(key: str, value: Any, parameter: Tensor) -> Any:
    """Moments lie where the parameter does; the count of steps stays where torch keeps it."""
    return value.to(parameter.device) if isinstance(value, Tensor) and value.shape == parameter.shape else value


def _bytes(module: nn.Module) -> int:
    """Of a unit, with two moments for each of its parameters."""
    parameters = sum(3 * p.numel() * p.element_size() for p in module.parameters())
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
