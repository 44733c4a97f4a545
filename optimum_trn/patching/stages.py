"""Pipeline stages of one model instance: each runs the stock forward with `Elsewhere` modules for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.random import rank_random
from optimum_trn.patching.elsewhere import Elsewhere, HandOver, Passage, PassingLayer, ShapeOnly, on_meta
from optimum_trn.patching.stage_map import StageMap

WRAPPED = ("base_layer", "original_module")
"""Under which names wrappers of PEFT hold the module whose place they have taken."""


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
        self.local: list[str] = []
        self.adapters = frozenset(getattr(model, "peft_config", None) or ())  # by name: those that all stages have
        self._hooks: list[RemovableHandle] = []
        for path, stage in stages.modules.items():
            module = model.get_submodule(path)
            if stage in self.own:
                self.local.append(path)
                if len(self.own) == 1:
                    continue
            stock = on_meta(module)
            if path in stages.sides:
                # Between an encoder and a decoder, there is no telling before from after.
                side = stages.sides[path] if stages.encoder_end is None else None
                self.elsewhere[path] = ShapeOnly(stock, self.passage, side)
            else:
                self.elsewhere[path] = PassingLayer(stock, self.passage)
            if stage not in self.own:
                self._put(path, self.elsewhere[path])
        for stage in self.own[: len(self.own) - self.is_last]:
            hook = HandOver(self.passage, stage, lambda: self.running)
            self._hooks.append(model.get_submodule(stages.last_layer(stage)).register_forward_hook(hook))
        if stages.encoder_end is not None:
            self._hooks.append(model.get_encoder().register_forward_hook(self._keep_encoded))
        self._stock_ties = model.all_tied_weights_keys
        model.all_tied_weights_keys = self._local_ties()

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.own[-1] == self.stages.num_stages - 1

    @property
    def hands_on(self) -> bool:
        """Whether a stage runs that only hands on what its last layer gives: what follows in the forward is unknown."""
        return self.running is not None and self.running < self.stages.num_stages - 1

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

    def _local_ties(self) -> dict[str, str]:
        """The ties among the names of this rank; the first stands in for a source that it does not have."""
        ties = {}
        for target, source in self._stock_ties.items():
            mine = [name for name in self.stages.aliases.get(target, (target, source)) if self.holds(name)]
            source = source if self.holds(source) or not mine else mine[0]
            if target in mine and source != target:
                ties[target] = source
        return ties

    def holders(self, name: str) -> list[int]:
        """The ranks that have the tensor of that name, or one that is tied to it, in ascending order."""
        ranks = set()
        for alias in self.stages.aliases.get(name, (name,)):
            stage = self.stages.stage_of(alias)
            ranks |= set(range(self.group.size)) if stage is None else {stage % self.group.size}
        return sorted(ranks)

    def check_adapters(self) -> None:
        """Raises `PlanError` for adapters of PEFT that the model has got since, of which no rank sees all layers."""
        late = set(getattr(self.model, "peft_config", None) or ()) - self.adapters
        if late:
            raise PlanError(
                f"The adapters {', '.join(sorted(late))} were added to the stages of one rank, after the model was cut "
                "by pipeline_parallel_size. Add them to the stock model, and give that PeftModel to NeuronTrainer."
            )

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this rank that has that name in the stock model, whose modules PEFT may have wrapped."""
        module: Any = self.model
        *path, last = name.split(".")
        for part in path:
            module = module.get_submodule(part)
            while wrapped := [module._modules[inner] for inner in WRAPPED if inner in module._modules]:
                module = wrapped[0]
        return module.get_parameter(last)

    def tied_over_ranks(self) -> dict[str, list[int]]:
        """The parameters of this rank that others have, too, in an order that all ranks share, and who has them."""
        seen: set[int] = set()
        found = {}
        for names in dict.fromkeys(self.stages.aliases.values()):
            holders = self.holders(names[0])
            mine = next((name for name in names if self.holds(name)), None)
            if len(holders) > 1 and mine is not None and id(self.parameter(mine)) not in seen:
                seen.add(id(self.parameter(mine)))
                found[mine] = holders
        return found

    def duplicates(self) -> set[str]:
        """The parameters of this rank that an earlier rank has, too: what counts once counts there."""
        return {name for name, holders in self.tied_over_ranks().items() if holders[0] != self.group.rank}

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The trained parameters of a stage of this rank."""
        found = {
            id(parameter): parameter
            for path in self.local
            if self.stages.modules[path] == stage
            for parameter in self.model.get_submodule(path).parameters()
            if parameter.requires_grad
        }
        return list(found.values())

    def run(self, stage: int, received: Any, call: Callable[[], Any]) -> Any:
        """Calls the model as that stage: what the next one receives, or what `call` returns if it is the last one.

        Stages hand on the outputs of their last layer; from the end of the encoder on, together with what it gave.
        """
        after_encoder = self.stages.encoder_end is not None and stage > self.stages.encoder_end
        encoded, layers = received if after_encoder else (None, received)
        with self._only(stage):
            self.passage.start(layers, encoded)
            self.running = stage
            try:
                with self._random():
                    result = call()
                return result if stage == self.stages.num_stages - 1 else self._handed_on(stage)
            finally:
                self.running = None
                self.passage.stop()

    def _handed_on(self, stage: int) -> Any:
        end = self.stages.encoder_end
        if end is None or stage < end:
            return self.passage.sent
        return self.passage.encoded, self.passage.sent if stage >= self.stages.decoder_start else None

    def _keep_encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running is not None and self.running == self.stages.encoder_end:
            self.passage.encoded = output[0]

    def _random(self) -> AbstractContextManager[None]:
        """In training, layers of different stages draw different random numbers, as layers of one process do."""
        if not (self.model.training and torch.is_grad_enabled()):
            return nullcontext()
        return rank_random(self.group, next(self.model.parameters()).device)

    def release(self) -> None:
        """Takes the stages back and moves no weights: the modules of other ranks are stock ones on the meta device."""
        for hook in self._hooks:
            hook.remove()
        for path in self.stages.modules:
            if path not in self.local:
                self._put(path, self.elsewhere[path].stock)
        self.model.all_tied_weights_keys = self._stock_ties

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the model whole again, with the current weights of all stages; a collective over the pipeline."""
        device = next(self.model.parameters()).device
        self.release()
        for path, stage in self.stages.modules.items():
            module = self.model.get_submodule(path)
            if path not in self.local:
                module.to_empty(device=device)
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, group=self.group.process_group, group_src=stage % self.group.size)
        self.model.tie_weights()

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """While active, the modules of this rank's other stages are elsewhere, too."""
        others = {path: self.model.get_submodule(path) for path in self.local if self.stages.modules[path] != stage}
        for path in others:
            self._put(path, self.elsewhere[path])
        try:
            yield
        finally:
            for path, module in others.items():
                self._put(path, module)

    def _put(self, path: str, module: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        self.model.get_submodule(owner)._modules[name] = module
