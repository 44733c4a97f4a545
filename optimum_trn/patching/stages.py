"""Pipeline stages of one model instance: each runs the stock forward with `Elsewhere` modules for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.random import rank_random
from optimum_trn.patching.elsewhere import Elsewhere, HandOver, Passage, PassingLayer, ShapeOnly, Side, on_meta


@dataclass(frozen=True)
class StageMap:
    """Which stage has which module, and which tensor: the same on all ranks.

    `modules` has the layers and everything with parameters beside them, by path; `tensors` everything in the state dict
    of the whole model, by each of its names, in order.  `tied` lists, for each parameter that goes by names on several
    stages, a name on each of them.
    """

    num_stages: int
    layers: tuple[str, ...]
    modules: dict[str, int]
    sides: dict[str, Side]
    tensors: dict[str, Tensor]
    aliases: dict[str, tuple[str, ...]]

    def stage_of(self, name: str) -> int | None:
        """The stage that has the tensor or module of that name; None if all have it."""
        while name:
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        return None


def map_stages(model: Any, ends: Sequence[str], beside_layers: Mapping[str, Side] | None = None) -> StageMap:
    """The stages of a whole model that end after the layers at `ends`.

    Of the modules beside the layers, those that are used before them belong to the first stage, and the others to the
    last one.  `UnsupportedModelError` for parameters that belong to no such module.
    """
    stack = ends[0].rpartition(".")[0]
    layers = tuple(f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children())
    modules: dict[str, int] = {}
    stage = 0
    for path in layers:
        modules[path] = stage
        stage += path in ends
    sides = sides_of(model, stack, beside_layers or {})
    modules |= {path: 0 if side == "before" else stage for path, side in sides.items()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # On the meta device, tied names may not be one parameter yet.
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups = [group for group in names.values() if target in group or source in group]
        if len(groups) == 2:
            groups[0] += groups[1]
            groups[1].clear()
    aliases = {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}
    tensors = {name: tensor.detach().to("meta") for name, tensor in model.state_dict().items()}
    return StageMap(stage + 1, layers, modules, sides, tensors, aliases)


def sides_of(model: Any, stack: str, beside_layers: Mapping[str, Side]) -> dict[str, Side]:
    """Which of the modules with parameters beside the layers of a stack are used before, and which after them.

    Those of `beside_layers` as it says.  Within the base model the others are used in the order in which they are
    registered; those outside of it are heads.
    """
    sides: dict[str, Side] = {}
    outside = True
    parts = stack.split(".")
    for depth, part in enumerate(parts):
        parent_path = ".".join(parts[:depth])
        parent = model.get_submodule(parent_path)
        outside = outside and parent is not model.base_model
        own = [name for name, _ in parent.named_parameters(recurse=False)]
        if own:
            raise UnsupportedModelError(
                f"{type(parent).__name__} has the parameters {', '.join(own)} of its own, next to its layers: which "
                "pipeline stage needs them is unknown. Set pipeline_parallel_size=1 for this model."
            )
        side: Side = "after" if outside else "before"
        for name, child in parent.named_children():
            path = f"{parent_path}.{name}" if parent_path else name
            if name == part:
                side = "after"
            elif any(True for _ in child.parameters()):
                sides[path] = beside_layers.get(path, side)
    return sides


class StagedModel:
    """The stages of a model that this rank runs; the modules of all others are `Elsewhere`."""

    def __init__(self, model: Any, stages: StageMap, group: RankGroup) -> None:
        self.model = model
        self.stages = stages
        self.group = group
        self.passage = Passage()
        self.running: int | None = None
        self.own = list(range(group.rank, stages.num_stages, group.size))
        self.elsewhere: dict[str, Elsewhere] = {}
        self.local: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        for path, stage in stages.modules.items():
            module = model.get_submodule(path)
            if stage in self.own:
                self.local[path] = module
                if len(self.own) == 1:
                    continue
            stock = on_meta(module)
            side = stages.sides.get(path)
            self.elsewhere[path] = (
                PassingLayer(stock, self.passage) if side is None else ShapeOnly(stock, self.passage, side)
            )
            if stage not in self.own:
                self._put(path, self.elsewhere[path])
        for stage in self.own[: len(self.own) - self.is_last]:
            last = [path for path in stages.layers if stages.modules[path] == stage][-1]
            hook = HandOver(self.passage, stage, lambda: self.running)
            self._hooks.append(self.local[last].register_forward_hook(hook))
        self._stock_ties = model.all_tied_weights_keys
        model.all_tied_weights_keys = {
            target: source for target, source in self._stock_ties.items() if self.holds(target) and self.holds(source)
        }

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.own[-1] == self.stages.num_stages - 1

    def holds(self, name: str) -> bool:
        """Whether this rank has the tensor of that name."""
        stage = self.stages.stage_of(name)
        return stage is None or stage in self.own

    def rank_of(self, name: str) -> int:
        """The rank that answers for the tensor of that name."""
        return (self.stages.stage_of(name) or 0) % self.group.size

    def whole(self, name: str) -> Tensor:
        """The tensor of that name of another rank, in the shape that it has in the stock model, on the meta device."""
        path = next(path for path in self.stages.modules if name.startswith(f"{path}."))
        found: Tensor = self.elsewhere[path].stock.state_dict()[name.removeprefix(f"{path}.")]
        return found

    def saved_tensors(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """What goes into the stock files of the whole model, in order: this rank's tensors, others on the meta device.

        Of tied weights, the one that the others are tied to.
        """
        left_out = set(self.model._keys_to_ignore_on_save or ())
        for names in self.stages.aliases.values():
            targets = [name for name in sorted(names) if name in self._stock_ties]
            left_out |= set(targets[: len(names) - 1])
        return {
            name: own[name] if name in own else self.whole(name) for name in self.stages.tensors if name not in left_out
        }

    def holders(self, name: str) -> list[int]:
        """The ranks that have the tensor of that name, or one that is tied to it, in ascending order."""
        ranks = set()
        for alias in self.stages.aliases.get(name, (name,)):
            stage = self.stages.stage_of(alias)
            ranks |= set(range(self.group.size)) if stage is None else {stage % self.group.size}
        return sorted(ranks)

    def tied_over_ranks(self) -> dict[str, list[int]]:
        """The parameters of this rank that others have, too, in an order that all ranks share, and who has them."""
        seen: set[int] = set()
        found = {}
        for names in dict.fromkeys(self.stages.aliases.values()):
            holders = self.holders(names[0])
            mine = next((name for name in names if self.holds(name)), None)
            if len(holders) > 1 and mine is not None and id(self.model.get_parameter(mine)) not in seen:
                seen.add(id(self.model.get_parameter(mine)))
                found[mine] = holders
        return found

    def duplicates(self) -> set[str]:
        """The parameters of this rank that an earlier rank has, too: what counts once counts there."""
        return {name for name, holders in self.tied_over_ranks().items() if holders[0] != self.group.rank}

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The trained parameters of a stage of this rank."""
        found = {
            id(parameter): parameter
            for path, module in self.local.items()
            if self.stages.modules[path] == stage
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        return list(found.values())

    def run(self, stage: int, received: Any, call: Callable[[], Any]) -> Any:
        """Calls the model as that stage: what the next one receives, or what `call` returns if it is the last one."""
        with self._only(stage):
            self.passage.received, self.passage.sent, self.passage.phase = received, None, "before"
            self.running = stage
            try:
                with self._random():
                    result = call()
                return result if stage == self.stages.num_stages - 1 else self.passage.sent
            finally:
                self.running = None
                self.passage.received, self.passage.sent, self.passage.phase = None, None, "idle"

    def _random(self) -> AbstractContextManager[None]:
        """In training, layers of different stages draw different random numbers, as layers of one process do."""
        if not (self.model.training and torch.is_grad_enabled()):
            return nullcontext()
        return rank_random(self.group, next(self.model.parameters()).device)

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the model whole again, with the current weights of all stages; a collective over the pipeline."""
        device = next(self.model.parameters()).device
        for hook in self._hooks:
            hook.remove()
        for path, stage in self.stages.modules.items():
            if path not in self.local:
                self._put(path, self.elsewhere[path].stock.to_empty(device=device))
            module = self.model.get_submodule(path)
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, group=self.group.process_group, group_src=stage % self.group.size)
        self.model.all_tied_weights_keys = self._stock_ties
        self.model.tie_weights()

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """While active, the modules of this rank's other stages are elsewhere, too."""
        others = [path for path in self.local if self.stages.modules[path] != stage]
        for path in others:
            self._put(path, self.elsewhere[path])
        try:
            yield
        finally:
            for path in others:
                self._put(path, self.local[path])

    def _put(self, path: str, module: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        self.model.get_submodule(owner)._modules[name] = module
