"""Schedules: what to change in a model, step by step, on paths with wildcards; checked as a whole, then applied.

The language is Slapo's (Chen et al., ASPLOS 2024, doi:10.1145/3617232.3640840).  Every shard makes a type of value that
some sync has to answer for: a column-wise linear needs the sum of its input gradients, a row-wise one the sum of its
partial outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError
from optimum_trn.parallel.mesh import TENSOR_AXIS, ParallelConfig
from optimum_trn.patching.engine import install
from optimum_trn.patching.state import PatchReport
from optimum_trn.patching.styles import (
    Action,
    ColumnWise,
    RowWise,
    SharedInput,
    Style,
    SummedGradients,
    VocabParallel,
    VocabParallelHead,
)

Value = Literal["output", "input gradient", "weight gradients"]
Operation = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True)
class Shard:
    """Cut a parameter of every module at `path` along `dim`, in equal shards."""

    path: str
    parameter: str
    dim: int

    def __str__(self) -> str:
        return f'schedule["{self.path}"].shard("{self.parameter}", {self.dim})'


@dataclass(frozen=True)
class Sync:
    """Make a value of every module at `path` the same on all ranks: sum partial ones, or gather partitioned ones."""

    path: str
    value: Value
    operation: Operation

    def __str__(self) -> str:
        return f'schedule["{self.path}"].sync("{self.value}", "{self.operation}")'


Step = Shard | Sync


class Schedule:
    """The steps for one model on the tensor-parallel ranks of one mesh; nothing changes until `apply`.

    `schedule["model.layers.*.mlp.up_proj"].shard("weight", 0)` records a step; `*` stands for anything within one
    component of a path.  A step that cannot be right raises `PlanError` where it is recorded (no such path or
    parameter, a parameter sharded twice); what takes all steps together to judge, such as a missing sync, in `check`.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        self.model = model
        self.mesh = mesh
        self.num_ranks = mesh[TENSOR_AXIS].size()
        self.journal: list[Step] = []
        names = (name for name, _ in model.named_modules(remove_duplicate=False))
        self._positions = {name: position for position, name in enumerate(names)}
        self._shards: dict[str, dict[str, int]] = {}
        self._syncs: dict[str, dict[Value, Operation]] = {}

    def __getitem__(self, path: str) -> Selection:
        return Selection(self, path)

    def __str__(self) -> str:
        return "\n".join(map(str, self.journal))

    def replay(self, journal: Iterable[Step]) -> Schedule:
        """Records the steps of another schedule, for this model."""
        for step in journal:
            self.record(step)
        return self

    def matches(self, path: str) -> list[str]:
        """The modules at a path with wildcards; `PlanError` if there are none, or not one after every `*`."""
        parts = path.split(".")
        end = max((index + 1 for index, part in enumerate(parts) if "*" in part), default=0)
        starts = [
            name
            for name in self._positions
            if len(components := name.split(".")) == end and all(map(fnmatchcase, components, parts))
        ]
        found = [".".join([start, *parts[end:]]) for start in starts] if end else [path]
        missing = sorted(set(found) - self._positions.keys()) if found else [path]
        if missing:
            raise PlanError(
                f"The schedule names {missing[0]!r}, which {type(self.model).__name__} does not have. "
                "Correct the path; `print(model)` shows what there is."
            )
        return found

    def record(self, step: Step) -> None:
        """Adds a step to the journal, or raises `PlanError` if it cannot be right whatever else is recorded."""
        for path in self.matches(step.path):
            if isinstance(step, Shard):
                self._record_shard(path, step)
            else:
                syncs = self._syncs.setdefault(path, {})
                if step.value in syncs:
                    raise PlanError(f"{path}: its {step.value} is synced already, by {syncs[step.value]}.")
                syncs[step.value] = step.operation
        self.journal.append(step)

    def _record_shard(self, path: str, step: Shard) -> None:
        parameter = self.model.get_submodule(path)._parameters.get(step.parameter)
        if parameter is None:
            raise PlanError(f"{path} has no parameter {step.parameter!r} to shard.")
        if not 0 <= step.dim < parameter.dim():
            raise PlanError(
                f"{path}.{step.parameter} has no dimension {step.dim}: its shape is {tuple(parameter.shape)}."
            )
        shards = self._shards.setdefault(path, {})
        if step.parameter in shards:
            raise PlanError(f"{path}.{step.parameter} is sharded already, along dimension {shards[step.parameter]}.")
        shards[step.parameter] = step.dim

    def check(self) -> list[Action]:
        """The style that each module needs; `PlanError` for a missing or a wrong sync, or shards that do not fit."""
        actions: dict[str, Style] = {}
        for path in sorted(self._shards.keys() | self._syncs.keys(), key=self._positions.__getitem__):
            style = self._style(path)
            if style is not None:
                actions[path] = style
        self._check_partitions(actions)
        return [Action(path, style) for path, style in actions.items()]

    def apply(self) -> PatchReport:
        """Checks the schedule and applies it to the model; `unpatch_model` takes it back."""
        return install(self.model, self.check(), ParallelConfig(self.num_ranks), self.mesh).report

    def _style(self, path: str) -> Style:
        module = self.model.get_submodule(path)
        shards, syncs = self._shards.get(path, {}), self._syncs.get(path, {})
        if not shards:
            return self._style_without_shards(path, syncs)
        if isinstance(module, nn.Embedding) and shards == {"weight": 0}:
            self._expect_syncs(path, syncs, {"output": "all_reduce"}, "its output is partial")
            return VocabParallel()
        if isinstance(module, nn.Linear) and shards.get("weight") == 0:
            if module.bias is not None and "bias" not in shards:
                raise PlanError(f"{path}: the bias must be sharded along 0 with the weight, as the outputs are.")
            own = {"input gradient": "all_reduce"}
            outer = [name for name in _ancestors(path) if "input gradient" in self._syncs.get(name, {})]
            if outer and "input gradient" in syncs:
                raise PlanError(f"{path}: its input gradient would be summed twice, here and by {outer[0]}.")
            if "output" in syncs:
                self._expect_syncs(path, syncs, {**own, "output": "all_gather"}, "its output is partitioned")
                return VocabParallelHead()
            if not outer:
                self._expect_syncs(path, syncs, own, "its input gradient is partial")
            return ColumnWise(copies_input=not outer)
        if isinstance(module, nn.Linear) and shards == {"weight": 1}:
            self._expect_syncs(
                path, syncs, {"output": "all_reduce"}, "its output is partial and its bias is added after"
            )
            return RowWise()
        raise PlanError(f"{path}: no layer of kind {type(module).__name__} computes with shards {shards}.")

    def _style_without_shards(self, path: str, syncs: dict[Value, Operation]) -> Style:
        if syncs == {"weight gradients": "all_reduce"}:
            return SummedGradients()
        if syncs == {"input gradient": "all_reduce"}:
            inner = [
                name for name, shards in self._shards.items() if name.startswith(f"{path}.") and 0 in shards.values()
            ]
            if not inner:
                raise PlanError(f"{path}: its input gradient is whole, since nothing in it is sharded column-wise.")
            return SharedInput()
        raise PlanError(f"{path}: nothing in it is sharded, so that there is nothing to sync by {syncs}.")

    @staticmethod
    def _expect_syncs(path: str, syncs: dict[Value, Operation], expected: dict[str, str], reason: str) -> None:
        if syncs != expected:
            raise PlanError(f"{path}: {reason}, so that it needs the syncs {expected}, not {syncs or 'none'}.")

    def _check_partitions(self, actions: dict[str, Style]) -> None:
        """Partitioned outputs stay inside the layer of a module list that a row-wise linear ends."""
        closed = {_layer(path) for path, style in actions.items() if isinstance(style, RowWise)}
        for path, style in actions.items():
            if isinstance(style, ColumnWise) and _layer(path) not in closed:
                raise PlanError(
                    f"{path}: its output stays partitioned, but no row-wise linear of {_layer(path)!r} takes it."
                )


@dataclass(frozen=True)
class Selection:
    """The modules of a schedule at a path with wildcards; `selection["a.b"]` goes on from there."""

    schedule: Schedule
    path: str

    def __getitem__(self, path: str) -> Selection:
        return Selection(self.schedule, f"{self.path}.{path}")

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self.schedule.model.get_submodule, self.schedule.matches(self.path))

    def shard(self, parameter: str, dim: int) -> Selection:
        """Cuts a parameter of these modules along `dim`."""
        self.schedule.record(Shard(self.path, parameter, dim))
        return self

    def sync(self, value: Value, operation: Operation) -> Selection:
        """Sums or gathers a value of these modules over the ranks."""
        self.schedule.record(Sync(self.path, value, operation))
        return self


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _layer(path: str) -> str:
    """The path up to its last index into a module list; empty if it has none."""
    parts = path.split(".")
    return ".".join(parts[: max((index + 1 for index, part in enumerate(parts) if part.isdigit()), default=0)])
