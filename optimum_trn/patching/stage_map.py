"""Which module of a model belongs to which pipeline stage: a function of the stock model, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.patching.elsewhere import Side


@dataclass(frozen=True)
class StageMap:
    """The stages of a model with one stack of layers, or with an encoder's and a decoder's, one after the other.

    `modules` says the stage of every layer and of everything with parameters beside them, by path, and `sides` whether
    that is used before or after the layers.  `tensors` is the state dict of the whole model, on the meta device, and
    `aliases` lists for every name of a tied parameter all of its names.
    """

    stacks: tuple[tuple[str, ...], ...]
    modules: dict[str, int]
    sides: dict[str, Side]
    tensors: dict[str, Tensor]
    aliases: dict[str, tuple[str, ...]]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return 1 + self.modules[self.stacks[-1][-1]]

    @property
    def encoder_end(self) -> int | None:
        """The stage in which the encoder ends, if there is one."""
        return self.modules[self.stacks[0][-1]] if len(self.stacks) > 1 else None

    @property
    def decoder_start(self) -> int:
        """The stage in which the last stack begins."""
        return self.modules[self.stacks[-1][0]]

    def last_layer(self, stage: int) -> str:
        """The layer that ends a stage."""
        return [path for stack in self.stacks for path in stack if self.modules[path] == stage][-1]

    def stage_of(self, name: str) -> int | None:
        """The stage that has the tensor or module of that name; None if all have it."""
        while name:
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        return None


def map_stages(
    model: Any, stacks: Sequence[str], ends: Sequence[str], beside_layers: Mapping[str, Side] | None = None
) -> StageMap:
    """The stages of a whole model, whose layers are at `stacks`, that end after the layers at `ends`.

    `beside_layers` corrects what `modules_beside` finds.  `UnsupportedModelError` as it says.
    """
    layers = tuple(
        tuple(f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children()) for stack in stacks
    )
    modules: dict[str, int] = {}
    stage = 0
    for path in (path for stack in layers for path in stack):
        modules[path] = stage
        stage += path in ends
    sides: dict[str, Side] = {}
    for path, (side, stack) in modules_beside(model, stacks, beside_layers or {}).items():
        sides[path] = side
        modules[path] = modules[layers[stack][0 if side == "before" else -1]]
    tensors = {name: tensor.detach().to("meta") for name, tensor in model.state_dict().items()}
    return StageMap(layers, modules, sides, tensors, _aliases(model))


def modules_beside(model: Any, stacks: Sequence[str], beside_layers: Mapping[str, Side]) -> dict[str, tuple[Side, int]]:
    """The modules with parameters beside the layers: used before or after them, and those of which stack.

    Within the base model they are used in the order in which they are registered, unless `beside_layers` says
    otherwise; outside of it they are heads.  `UnsupportedModelError` for parameters that are in no such module.
    """
    found: dict[str, tuple[Side, int]] = {}
    for stack in stacks:
        outside = True
        parts = stack.split(".")
        for depth in range(len(parts)):
            parent_path = ".".join(parts[:depth])
            prefix = f"{parent_path}." if parent_path else ""
            on_way = {
                i: other[len(prefix) :].split(".")[0] for i, other in enumerate(stacks) if other.startswith(prefix)
            }
            parent = model.get_submodule(parent_path)
            outside = outside and parent is not model.base_model
            own = [name for name, _ in parent.named_parameters(recurse=False)]
            if own:
                raise UnsupportedModelError(
                    f"{type(parent).__name__} has the parameters {', '.join(own)} of its own, next to its layers: "
                    "which pipeline stage needs them is unknown. Set pipeline_parallel_size=1 for this model."
                )
            side: Side = "after" if outside else "before"
            for name, child in parent.named_children():
                if name in on_way.values():
                    side = "after"
                elif any(True for _ in child.parameters()):
                    used = beside_layers.get(prefix + name, side)
                    found[prefix + name] = used, min(on_way) if used == "before" else max(on_way)
    return found


def _aliases(model: Any) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # On the meta device, tied names may not be one parameter yet.
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups = [group for group in names.values() if target in group or source in group]
        if len(groups) == 2:
            groups[0] += groups[1]
            groups[1].clear()
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}
