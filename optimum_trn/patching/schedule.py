"""Schedules: what to change in a model, step by step, on paths with wildcards; checked as a whole, then applied.

The language is Slapo's (Chen et al., ASPLOS 2024, doi:10.1145/3617232.3640840).  Every shard makes a type of value that
some sync has to answer for: a column-wise linear needs the sum of its input gradients, a row-wise one the sum of its
partial outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block
from optimum_trn.parallel.mesh import TENSOR_AXIS, ParallelConfig, pipeline_size
from optimum_trn.patching.autotune import Chosen, Space, Tuning, autotune
from optimum_trn.patching.dropout import ForkRngInBlocks
from optimum_trn.patching.engine import install, uninstall
from optimum_trn.patching.marks import Annotated
from optimum_trn.patching.primitives import (
    Annotate,
    Checkpoint,
    CutPipelineStage,
    Decompose,
    ForkRng,
    Fuse,
    Primitive,
    ReplaceForward,
)
from optimum_trn.patching.region_styles import CutModule, SharedInputs
from optimum_trn.patching.sequence import SequenceParallel
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
from optimum_trn.patching.verify import Verification, verify
from optimum_trn.patching.wrappers import Forward

Value = Literal["output", "input gradient", "weight gradients"]
Operation = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True)
class Shard:
    """Cut a parameter of every module at `path` along `dim`, in equal shards, or each of `blocks` in such."""

    path: str
    parameter: str
    dim: int
    blocks: tuple[Block, ...] = ()

    def __str__(self) -> str:
        blocks = f", {self.blocks}" if self.blocks else ""
        return f'schedule["{self.path}"].shard("{self.parameter}", {self.dim}{blocks})'


@dataclass(frozen=True)
class Sync:
    """Make a value of every module at `path` the same on all ranks: sum partial ones, or gather partitioned ones."""

    path: str
    value: Value
    operation: Operation

    def __str__(self) -> str:
        return f'schedule["{self.path}"].sync("{self.value}", "{self.operation}")'


@dataclass(frozen=True)
class Replace:
    """Give every module at `path` a style of its own, for what no shard and sync describe."""

    path: str
    style: Style

    def __str__(self) -> str:
        return f'schedule["{self.path}"].replace({self.style})'


Step = Shard | Sync | Replace | Primitive


class Schedule:
    """The steps for one model on the tensor-parallel ranks of one mesh; nothing changes until `apply`.

    `schedule["model.layers.*.mlp.up_proj"].shard("weight", 0)` records a step; `*` stands for anything within one
    component of a path.  A step that cannot be right raises `PlanError` where it is recorded (no such path or
    parameter, a parameter sharded twice); what takes all steps together to judge, such as a missing sync, in `check`.

    `config` says what the steps do not: the degrees are those of `mesh`.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, config: ParallelConfig | None = None) -> None:
        self.model = model
        self.mesh = mesh
        self.config = config or ParallelConfig()
        self.num_ranks = 1 if mesh is None else mesh[TENSOR_AXIS].size()
        self.journal: list[Step] = []
        names = (name for name, _ in model.named_modules(remove_duplicate=False))
        self._positions = {name: position for position, name in enumerate(names)}
        self._shards: dict[str, dict[str, int]] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}
        self._replaced: dict[str, list[Style]] = {}
        self._syncs: dict[str, dict[Value, Operation]] = {}
        self._primitives: list[tuple[Primitive, list[Action]]] = []

    def __getitem__(self, path: str) -> Selection:
        return Selection(self, path)

    def __str__(self) -> str:
        return "\n".join(map(str, self.journal))

    def replay(self, journal: Iterable[Step]) -> Schedule:
        """Records the steps of another schedule, for this model."""
        for step in journal:
            self.record(step)
        return self

    def find(self, path: str) -> list[str]:
        """The modules at a path with wildcards, if there are any; `PlanError` if not one after every `*`."""
        parts = path.split(".")
        end = max((index + 1 for index, part in enumerate(parts) if "*" in part), default=0)
        starts = [
            name
            for name in self._positions
            if len(components := name.split(".")) == end and all(map(fnmatchcase, components, parts))
        ]
        found = [".".join([start, *parts[end:]]) for start in starts] if end else [path]
        missing = sorted(set(found) - self._positions.keys())
        if missing and not end:
            return []
        if missing:
            self._refuse(missing[0])
        return found

    def matches(self, path: str) -> list[str]:
        """The modules at a path with wildcards; `PlanError` if there are none, or not one after every `*`."""
        return self.find(path) or self._refuse(path)

    def _refuse(self, path: str) -> NoReturn:
        raise PlanError(
            f"The schedule names {path!r}, which {type(self.model).__name__} does not have. "
            "Correct the path; `print(model)` shows what there is."
        )

    def record(self, step: Step) -> None:
        """Adds a step to the journal, or raises `PlanError` if it cannot be right whatever else is recorded."""
        paths = self.matches(step.path)
        if isinstance(step, Primitive):
            self._record_primitive(step, paths)
            paths = []
        for path in paths:
            if isinstance(step, Shard):
                self._record_shard(path, step)
            elif isinstance(step, Replace):
                self._replaced.setdefault(path, []).append(step.style)
            elif isinstance(step, Sync):
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
        if self._blocks.setdefault(path, step.blocks) != step.blocks:
            raise PlanError(f"{path}: its parameters are sharded in different blocks.")

    def _record_primitive(self, step: Primitive, paths: list[str]) -> None:
        actions = step.actions(self.model, paths)
        recorded = {(path, type(style)) for _, others in self._primitives for path, style in others}
        for path, style in actions:
            if (path, type(style)) in recorded and not isinstance(style, Annotated):
                raise PlanError(f"{path}: it is {type(style).__name__} already.")
        self._primitives.append((step, actions))

    def check(self) -> list[Action]:
        """The style that each module needs; `PlanError` for a missing or a wrong sync, or shards that do not fit."""
        actions: list[Action] = []
        for path in sorted(
            self._shards.keys() | self._syncs.keys() | self._replaced.keys(), key=self._positions.__getitem__
        ):
            if path in self._shards or path in self._syncs:
                actions.append(Action(path, self._style(path)))
            actions += [Action(path, style) for style in self._replaced.get(path, ())]
        self._check_partitions(actions)
        # Last, because a wrapper takes the forward that it finds.
        actions += [action for _, others in self._primitives for action in others]
        styles: dict[str, list[Style]] = {}
        for path, style in actions:
            styles.setdefault(path, []).append(style)
        for primitive, others in self._primitives:
            primitive.check(others, styles)
        return actions

    def apply(self) -> PatchReport:
        """Checks the schedule and applies it to the model; `unpatch_model` takes it back."""
        return install(self.model, self.check(), self._parallel_config, self.mesh).report

    @property
    def _parallel_config(self) -> ParallelConfig:
        shares = any(isinstance(primitive, SequenceParallel) for primitive, _ in self._primitives)
        return replace(
            self.config,
            tensor_parallel_size=self.num_ranks,
            sequence_parallel=shares,
            pipeline_parallel_size=pipeline_size(self.mesh),
        )

    def verify(self, batch: Mapping[str, Tensor], seed: int = 0) -> Verification:
        """Checks the schedule and compares a scheduled copy of the model with the model itself, in one training step.

        The model stays as it is.  All ranks must call it, with equal weights and batches.  `PlanError` if anything
        differs; see `optimum_trn.patching.verify`.
        """
        assert self.mesh is not None, "without a mesh there is nothing to compare"
        if pipeline_size(self.mesh) > 1:
            raise PlanError(
                "verify compares whole models, and here every rank would have a stage only. Verify the schedule on a "
                "mesh without pipeline ranks; cuts change nothing in what is computed."
            )
        return verify(self.model, self.check(), self._parallel_config, self.mesh, batch, seed)

    def autotune(
        self,
        space: Space,
        record: Callable[[Schedule, Chosen], None],
        measure: Callable[[PreTrainedModel, Chosen], float],
        budget: int | None = None,
    ) -> Tuning:
        """Looks for the choices under which this schedule, with what `record` adds to a copy of it, scores best.

        `measure` gets the model with that schedule applied, and returns what is to be high, such as samples per second.
        The lowest score of all ranks counts, and memory that is full on one of them.  The model stays as it is.
        """

        def evaluate(**chosen: Any) -> float | None:
            schedule = Schedule(self.model, self.mesh).replay(self.journal)
            record(schedule, chosen)
            schedule.apply()
            try:
                score = measure(self.model, chosen)
            except torch.OutOfMemoryError:
                score = -torch.inf
            finally:
                uninstall(self.model)
            assert self.mesh is not None, "without a mesh there is no lowest score of several"
            worst = torch.tensor(score, dtype=torch.float32, device=self.mesh.device_type)
            dist.all_reduce(worst, op=dist.ReduceOp.MIN)
            return None if worst == -torch.inf else worst.item()

        return autotune(evaluate, space, budget)

    def _style(self, path: str) -> Style:
        module = self.model.get_submodule(path)
        shards, syncs = self._shards.get(path, {}), self._syncs.get(path, {})
        if not shards:
            return self._style_without_shards(path, syncs)
        if isinstance(module, nn.Embedding) and shards == {"weight": 0}:
            self._expect_syncs(path, syncs, {"output": "all_reduce"}, "its output is partial")
            return VocabParallel()
        columns, rows = (1, 0) if isinstance(module, Conv1D) else (0, 1)
        linear = isinstance(module, (nn.Linear, Conv1D))
        if linear and shards.get("weight") == columns:
            if module.bias is not None and "bias" not in shards:
                raise PlanError(f"{path}: the bias must be sharded along 0 with the weight, as the outputs are.")
            own = {"input gradient": "all_reduce"}
            outer = [name for name in _ancestors(path) if self._enters(name)]
            if outer and "input gradient" in syncs:
                raise PlanError(f"{path}: its input gradient would be summed twice, here and by {outer[0]}.")
            if "output" in syncs:
                self._expect_syncs(path, syncs, {**own, "output": "all_gather"}, "its output is partitioned")
                return VocabParallelHead()
            if not outer:
                self._expect_syncs(path, syncs, own, "its input gradient is partial")
            return ColumnWise(copies_input=not outer, blocks=self._blocks[path])
        if linear and shards == {"weight": rows}:
            self._expect_syncs(
                path, syncs, {"output": "all_reduce"}, "its output is partial and its bias is added after"
            )
            return RowWise(self._blocks[path])
        raise PlanError(f"{path}: no layer of kind {type(module).__name__} computes with shards {shards}.")

    def _enters(self, path: str) -> bool:
        """Whether the module at a path sums the gradient of its input for all linears in it."""
        entered = any(isinstance(style, SharedInputs) for style in self._replaced.get(path, ()))
        return entered or "input gradient" in self._syncs.get(path, {})

    def _style_without_shards(self, path: str, syncs: dict[Value, Operation]) -> Style:
        if syncs == {"weight gradients": "all_reduce"}:
            return SummedGradients()
        if syncs == {"input gradient": "all_reduce"}:
            cut = {name for name, shards in self._shards.items() if "weight" in shards}
            cut |= {name for name, own in self._replaced.items() if any(isinstance(style, CutModule) for style in own)}
            inner = [name for name in cut if name.startswith(f"{path}.")]
            if not inner:
                raise PlanError(f"{path}: its input gradient is whole, since nothing in it is sharded column-wise.")
            return SharedInput()
        raise PlanError(f"{path}: nothing in it is sharded, so that there is nothing to sync by {syncs}.")

    @staticmethod
    def _expect_syncs(path: str, syncs: dict[Value, Operation], expected: dict[str, str], reason: str) -> None:
        if syncs != expected:
            raise PlanError(f"{path}: {reason}, so that it needs the syncs {expected}, not {syncs or 'none'}.")

    def _check_partitions(self, actions: list[Action]) -> None:
        """Partitioned outputs stay inside the layer of a module list that a row-wise linear ends."""
        closed = {layer for path, style in actions if _leaves(style) for layer in _layers(path)}
        for path, style in actions:
            if isinstance(style, ColumnWise) and not closed.intersection(_layers(path)):
                raise PlanError(
                    f"{path}: its output stays partitioned, but no row-wise linear of {_layers(path)[-1]!r} takes it."
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

    def each(self) -> Iterator[Selection]:
        """These modules one by one."""
        return (Selection(self.schedule, path) for path in self.schedule.matches(self.path))

    def has(self, path: str) -> bool:
        """Whether all these modules have a module or a parameter at `path`."""
        return all(_has(module, path) for module in self)

    def shard(self, parameter: str, dim: int, blocks: Sequence[Block] = ()) -> Selection:
        """Cuts a parameter of these modules along `dim`, which consists of consecutive `blocks` that are each cut."""
        self.schedule.record(Shard(self.path, parameter, dim, tuple(blocks)))
        return self

    def replace(self, style: Style | Forward) -> Selection:
        """Gives these modules a style of their own, or computes `style(module, ...)` in place of their forward."""
        self.schedule.record(
            Replace(self.path, style) if isinstance(style, Style) else ReplaceForward(self.path, style)
        )
        return self

    def sync(self, value: Value, operation: Operation) -> Selection:
        """Sums or gathers a value of these modules over the ranks."""
        self.schedule.record(Sync(self.path, value, operation))
        return self

    def checkpoint(self, ratio: float = 1.0) -> Selection:
        """Recomputes the activations of the first `ratio` of these modules in the backward pass."""
        self.schedule.record(Checkpoint(self.path, ratio))
        return self

    def fork_rng(self) -> Selection:
        """Lets these modules, which see sharded activations, draw other random numbers on every rank in training."""
        self.schedule.record(ForkRng(self.path))
        return self

    def fork_rng_in_blocks(self) -> Selection:
        """Lets these layers draw other random numbers on every rank within their sharded blocks, and nowhere else."""
        self.schedule.record(ForkRngInBlocks(self.path))
        return self

    def sequence_parallel(self) -> Selection:
        """Lets each rank hold a run of the sequence between the sharded blocks of these layers."""
        self.schedule.record(SequenceParallel(self.path))
        return self

    def annotate(self, parameter: str, key: str, value: Any) -> Selection:
        """Tags a parameter of these modules; `annotations_of(model)` lists the tags after `apply`."""
        self.schedule.record(Annotate(self.path, parameter, key, value))
        return self

    def fuse(self, *linears: str) -> Selection:
        """Makes one product of linears within these modules that read the same input; their names and shapes stay."""
        self.schedule.record(Fuse(self.path, linears))
        return self

    def decompose(self) -> Selection:
        """Lets these linears add their bias as an operation of its own, after the product."""
        self.schedule.record(Decompose(self.path))
        return self

    def cut_pipeline_stage(self) -> Selection:
        """Ends a pipeline stage after these layers; `stages_of(model)` lists the stages after `apply`."""
        self.schedule.record(CutPipelineStage(self.path))
        return self


def _has(module: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    try:
        attribute = getattr(module.get_submodule(owner), name, None)
    except AttributeError:
        return False
    return isinstance(attribute, (nn.Module, nn.Parameter))


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _layers(path: str) -> list[str]:
    """The path up to each of its indices into module lists; the whole model if it has none."""
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()] or [""]


def _leaves(style: Style) -> bool:
    return isinstance(style, RowWise) or (isinstance(style, CutModule) and style.leaves)
