"""The primitives of a schedule that neither cut nor sync: each makes styles for the modules at a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimum_trn.errors import PlanError
from optimum_trn.patching.head_styles import PerHead, WholeNorm
from optimum_trn.patching.marks import Annotated, EndsStage
from optimum_trn.patching.styles import (
    Action,
    ColumnWise,
    RowWise,
    Style,
    VocabParallel,
    VocabParallelHead,
)
from optimum_trn.patching.wrappers import (
    Decomposed,
    Forward,
    Fused,
    RankRandom,
    Recomputed,
    Replaced,
    Wrapper,
    first_part,
)

OWN_FORWARD = (ColumnWise, RowWise, VocabParallel, VocabParallelHead, WholeNorm)
"""The styles that compute something else than the stock forward of their module."""

Kinds = tuple[type, ...]


@dataclass(frozen=True)
class Primitive:
    """A step for every module at `path`."""

    path: str

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        """The styles of the modules at `paths`, which the path matches; `PlanError` if there cannot be such."""
        raise NotImplementedError

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        """Raises `PlanError` if its `actions` do not go together with what cuts and syncs the modules, by path."""


@dataclass(frozen=True)
class ReplaceForward(Primitive):
    """Compute `function(module, ...)` in place of the stock forward, on the same parameters."""

    function: Forward

    def __str__(self) -> str:
        return f'schedule["{self.path}"].replace({self.function.__module__}.{self.function.__qualname__})'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        return [Action(path, Replaced(self.function)) for path in paths]

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        for path, _ in actions:
            _refuse_after(path, Replaced, styles, (*OWN_FORWARD, PerHead, Wrapper))


@dataclass(frozen=True)
class Checkpoint(Primitive):
    """Recompute the activations of the first `ratio` of the modules, rounded up, in the backward pass."""

    ratio: float

    def __str__(self) -> str:
        return f'schedule["{self.path}"].checkpoint({self.ratio})'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        if not 0 < self.ratio <= 1:
            raise PlanError(
                f"{self.path}: the ratio of modules to recompute is above 0 and at most 1, not {self.ratio}."
            )
        return [Action(path, Recomputed()) for path in first_part(paths, self.ratio)]


@dataclass(frozen=True)
class ForkRng(Primitive):
    """Draw other random numbers on every rank, as activations that are sharded need."""

    def __str__(self) -> str:
        return f'schedule["{self.path}"].fork_rng()'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        return [Action(path, RankRandom()) for path in paths]


@dataclass(frozen=True)
class Annotate(Primitive):
    """Tag a parameter with a key and a value."""

    parameter: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f'schedule["{self.path}"].annotate("{self.parameter}", "{self.key}", {self.value!r})'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        for path in paths:
            if model.get_submodule(path)._parameters.get(self.parameter) is None:
                raise PlanError(f"{path} has no parameter {self.parameter!r} to annotate.")
        return [Action(path, Annotated(self.parameter, self.key, self.value)) for path in paths]


@dataclass(frozen=True)
class Fuse(Primitive):
    """Make one product of linears within the modules that read the same input."""

    linears: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.linears)
        return f'schedule["{self.path}"].fuse({names})'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        for path in paths:
            for name in self.linears:
                try:
                    model.get_submodule(path).get_submodule(name)
                except AttributeError:
                    raise PlanError(f"{path} has no {name!r} to fuse.") from None
        return [Action(path, Fused(self.linears)) for path in paths]

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        for path, _ in actions:
            members = [f"{path}.{name}" for name in self.linears]
            for member in members:
                _refuse_after(member, Fused, styles, (Wrapper,))
            cut = {tuple(_computing(styles.get(member, ()))) for member in members}
            kinds = {tuple((type(style), getattr(style, "copies_input", None)) for style in own) for own in cut}
            if len(kinds) > 1 or not all(isinstance(style, ColumnWise) for own in cut for style in own):
                raise PlanError(f"{path}: {', '.join(self.linears)} are not all cut by output features, or all whole.")


@dataclass(frozen=True)
class Decompose(Primitive):
    """Let a linear add its bias as an operation of its own, after the product."""

    def __str__(self) -> str:
        return f'schedule["{self.path}"].decompose()'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        return [Action(path, Decomposed()) for path in paths]

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        for path, _ in actions:
            _refuse_after(path, Decomposed, styles, (VocabParallelHead, Wrapper))


@dataclass(frozen=True)
class CutPipelineStage(Primitive):
    """End a pipeline stage after a layer."""

    def __str__(self) -> str:
        return f'schedule["{self.path}"].cut_pipeline_stage()'

    def actions(self, model: nn.Module, paths: Sequence[str]) -> list[Action]:
        for path in paths:
            layers, _, name = path.rpartition(".")
            owner = model.get_submodule(layers)
            if not isinstance(owner, nn.ModuleList):
                raise PlanError(f"{path} is not a layer of a module list, after which a pipeline stage could end.")
            # After an encoder the decoder follows.
            if int(name) == len(owner) - 1 and not _has_decoder(model, layers):
                raise PlanError(f"{path} is the last layer: a pipeline stage after it would be empty.")
        return [Action(path, EndsStage()) for path in paths]

    def check(self, actions: Sequence[Action], styles: Mapping[str, Sequence[Style]]) -> None:
        ends = [path for path, own in styles.items() if any(isinstance(style, EndsStage) for style in own)]
        if len({path.rpartition(".")[0].replace("encoder", "decoder") for path in ends}) > 1:
            raise PlanError(f"pipeline stages end in different module lists: {', '.join(ends)}.")


def _has_decoder(model: nn.Module, layers: str) -> bool:
    """Whether the layers at a path are those of an encoder that a decoder follows."""
    decoder = layers.replace("encoder", "decoder")
    return decoder != layers and any(name == decoder for name, _ in model.named_modules())


def _computing(styles: Sequence[Style]) -> list[Style]:
    return [style for style in styles if isinstance(style, OWN_FORWARD)]


def _refuse_after(path: str, wrapper: type, styles: Mapping[str, Sequence[Style]], kinds: Kinds) -> None:
    """Raises `PlanError` if the forward that `wrapper` does without is more than the stock one."""
    for style in styles.get(path, ()):
        if isinstance(style, wrapper):
            return
        if isinstance(style, kinds):
            dropped, name = type(style).__name__, wrapper.__name__
            raise PlanError(
                f"{path}: {name} would drop what {dropped} does there. Leave one out, or record {name} first."
            )
