"""What the real compiler would do in this process: a new graph is a compilation, a value that is read a graph break.

A graph is everything that a core is asked to do from one cut to the next; an optimizer's step ends one, and so does
every value that the host reads. Its key is its content only. The recorder (csrc/recorder.h) follows the graphs of a
thread and calls here when one leaves all that it knows.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optimum_trn.device import compile_cache, recompiles
from optimum_trn.device.code_lines import CodeLine, frames, users_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compilation:
    """A graph that this process ran: estimated seconds of its compilation, or none where the cache had it."""

    module: str
    operations: int
    seconds: float
    cached: bool
    step: int
    cause: str


@dataclass
class GraphBreak:
    """A line of the user's code that reads values from the core: how often, and how often it cut a graph in two."""

    line: CodeLine
    kind: str
    reads: int = 0
    cuts: int = 0

    def __str__(self) -> str:
        text = f" `{self.line.text}`" if self.line.text else ""
        return f"{self.line}{text}: {self.kind}, {self.reads} times, {self.cuts} of them in the middle of a graph"


@dataclass
class StepGraphs:
    """The graphs and graph breaks of one process so far."""

    target: str
    compilations: list[Compilation] = field(default_factory=list)
    breaks: dict[tuple[CodeLine, str], GraphBreak] = field(default_factory=dict)
    steps: int = 0
    on_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after every step."""
    last_step: list[tuple[int, GraphBreak | None]] = field(default_factory=list)
    """The graphs that the last step ran, in order: their numbers in the recorder, and the read that ended each."""

    def __post_init__(self) -> None:
        self._seen: dict[str, None] = {}
        self.generation = self._count = 0  # how often the recorder forgot all graphs, and how many it has since
        self._ended_by: dict[int, GraphBreak] = {}  # graphs by the read that ended them first
        self._last_read: GraphBreak | None = None  # what ended the graph before this one, if a read did
        self._optimizers: list[int] = []
        self._thread = threading.get_ident()  # the one that computes: another one has graphs of its own
        # Bounded for programs that never end a step.
        self._ran: deque[tuple[int, GraphBreak | None]] = deque(maxlen=4096)
        self._cache: compile_cache.CompileCache | None = None
        self._cache_url: str | None = None

    @property
    def graphs(self) -> int:
        """How many different graphs ran."""
        return len(self.compilations)

    @property
    def cache_hits(self) -> int:
        """How many of them another run had compiled."""
        return sum(compilation.cached for compilation in self.compilations)

    @property
    def graph_breaks(self) -> int:
        """How often a value that was read cut a graph."""
        return sum(entry.cuts for entry in self.breaks.values())

    @property
    def compile_seconds(self) -> float:
        """What the compilations would take on the hardware, one after the other: an estimate."""
        return sum(compilation.seconds for compilation in self.compilations)

    # ---- What the recorder calls, on the thread that computes

    def left_known(
        self,
        expected: recompiles.Operation | None,
        actual: recompiles.Operation,
        place: int,
        step: int,
        after_end: bool,
        starts_over: bool,
        should_start_over: bool,
    ) -> str:
        """Why the graph is new that leaves all known ones with `actual`, its operation number `place` from 0."""
        try:
            stack = frames()
            if _is_printing(stack):  # it computes on the core what it shows
                line = users_line(stack)
                return f"{KINDS['print']} at {line} (`{line.text}`) in the middle of a graph"
            if place == 0 and self._last_read is not None and (expected is None or expected[0] != actual[0]):
                return f"it follows what was read at {self._last_read.line} ({self._last_read.kind})"
            return recompiles.explain(
                expected,
                actual,
                step=step + 1,
                stack=stack,
                after_end=after_end,
                starts_over=starts_over,
                should_start_over=should_start_over,
                input_of=_extension().input_of,
            )
        except Exception as error:  # what it says must never end a training run
            logger.exception("A recompilation could not be explained.")
            return f"it could not be explained: {error!r}"

    def was_read(self, kind: str, ended: int, step: int) -> None:
        """A value left the core; `ended` is the number of the graph that it ended, or -1."""
        if threading.get_ident() == self._thread:
            try:
                self._note_read(kind, ended)
            except Exception:
                logger.exception("A graph break could not be located.")

    def _note_read(self, kind: str, ended: int) -> None:
        stack = frames()
        if _is_printing(stack):
            kind = "print"
        line = users_line(stack)
        key = (line, KINDS[kind])
        entry = self.breaks.get(key)
        if entry is None:
            entry = self.breaks[key] = GraphBreak(line, KINDS[kind])
        entry.reads += 1
        if ended >= 0:
            entry.cuts += 1
            self._last_read = entry
            self._ended_by.setdefault(ended, entry)
            self._ran.append((ended, entry))

    # ---- Steps

    def begin_optimizer(self, optimizer: Any, *_: Any) -> None:
        """An optimizer's step begins: numbers in it are passed at run time, as the learning rate is."""
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in self._optimizers:  # its last step raised
            del self._optimizers[self._optimizers.index(id(optimizer)) :]
        self._optimizers.append(id(optimizer))
        _extension().in_optimizer(True)

    def end_optimizer(self, optimizer: Any, *_: Any) -> None:
        """An optimizer's step ends, and with the outermost one the graph."""
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in self._optimizers:
            del self._optimizers[self._optimizers.index(id(optimizer)) :]
        if self._optimizers:
            return
        _extension().in_optimizer(False)
        self.mark_step(ends_step=True)

    def mark_step(self, ends_step: bool = False) -> None:
        """End the graph here, without reading anything."""
        ended, steps, generation, count = _extension().cut_graph(ends_step)
        if threading.get_ident() != self._thread:
            return
        self.steps = steps
        self._last_read = None
        if ended >= 0:
            self._ran.append((ended, None))
        if (generation, count) != (self.generation, self._count):
            self.collect()
        if ends_step:
            self.last_step = list(self._ran)
            self._ran.clear()
            for function in self.on_step:
                function()

    def collect(self) -> None:
        """Compile, that is note, look up and keep, the graphs that are new since the last time."""
        extension = _extension()
        generation, runs = extension.graph_runs()
        if generation != self.generation:
            self.generation, self._count = generation, 0
            self._ended_by.clear()
        for number in range(self._count, len(runs)):
            self._compile(extension.graph(number), self._ended_by.pop(number, None))
        self._count = len(runs)

    def _compile(self, graph: dict[str, Any], ended_by: GraphBreak | None) -> None:
        module = compile_cache.module_name(graph["content"], self.target)
        if module in self._seen:
            return
        self._seen[module] = None
        cause = graph["cause"] or "it is the first graph"
        if graph["ended_early"] and ended_by is not None:
            cause = f"{ended_by.kind} at {ended_by.line} (`{ended_by.line.text}`) cut a graph in two"
        elif graph["ended_early"]:
            cause = "the graph ended before the end of one that is known"
        operations, step = graph["operations"], graph["step"] + 1
        seconds = compile_cache.estimated_seconds(operations)
        cached = self._look_up(
            compile_cache.CachedGraph(module, operations, seconds, step, cause, sys.argv[0], time.time())
        )
        self.compilations.append(Compilation(module, operations, 0.0 if cached else seconds, cached, step, cause))

    def _look_up(self, graph: compile_cache.CachedGraph) -> bool:
        """Whether the cache has the graph; it does from now on."""
        url = compile_cache.cache_url()
        if url is None:
            return False
        if self._cache is None or url != self._cache_url:
            self._cache, self._cache_url = compile_cache.CompileCache(url), url
        try:
            return graph.module in self._cache or not self._cache.add(graph)
        except OSError as error:
            logger.warning("The compile cache %s can't be used, so every run compiles anew: %s", url, error)
            os.environ["NEURON_CC_FLAGS"] = os.environ.get("NEURON_CC_FLAGS", "") + " --no_cache"
            return False

    def forget(self) -> None:
        """Begin anew, as a new process would: no graph is known but those in the cache."""
        _extension().forget_graphs()
        self.steps = 0
        self.__post_init__()
        self.compilations.clear()
        self.breaks.clear()
        self.last_step = []

    def summary(self) -> str:
        """A few lines for people."""
        self.collect()
        recompiled = [c for c in self.compilations if not c.cached]
        lines = [
            f"Simulated compiler: {self.graphs} graphs, {self.cache_hits} of them in the cache, "
            f"{len(recompiled)} compiled, which is estimated to take {self.compile_seconds:.0f} s on the hardware; "
            f"{self.graph_breaks} graph breaks."
        ]
        lines += [f"  graph of {c.operations} operations, {c.seconds:.0f} s: {c.cause}" for c in recompiled]
        lines += [f"  {entry}" for entry in self.breaks.values()]
        return "\n".join(lines)


KINDS = {
    "value": "a value was read (.item(), float(), bool(), if)",
    "copy": "a tensor was copied to the host (.cpu(), .tolist(), .numpy())",
    "print": "a tensor was printed",
}
_PRINTING = os.path.join(os.path.dirname(torch.__file__), "_tensor_str.py")


def _is_printing(stack: list[FrameType]) -> bool:
    return any(frame.f_code.co_filename == _PRINTING for frame in stack)


_graphs: StepGraphs | None = None


def _extension() -> ModuleType:
    from optimum_trn.device.build import load_extension

    return load_extension()


def start(extension: ModuleType, target: str) -> StepGraphs:
    """Follow the graphs of this process, on a chip named `target`; called when its core is chosen."""
    global _graphs
    if _graphs is not None:
        return _graphs
    _graphs = StepGraphs(target)
    extension.listen_to_recorder(_graphs.left_known, _graphs.was_read)
    register_optimizer_step_pre_hook(_graphs.begin_optimizer)
    register_optimizer_step_post_hook(_graphs.end_optimizer)
    atexit.register(_at_exit)
    return _graphs


def step_graphs() -> StepGraphs | None:
    """The graphs of this process; None before its core is used."""
    return _graphs


def _at_exit() -> None:
    """What a training run did after its last step, evaluation say, is in the cache for the next run as well."""
    if _graphs is not None and _graphs.steps and not _extension_is_gone():
        _graphs.mark_step()


def _extension_is_gone() -> bool:
    from optimum_trn.device import runtime

    return not runtime.is_initialized()
