"""Models that run while they are loaded: each layer as soon as its weights have come from the pool."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint import stock
from ..checkpoint.agreement import agreed
from ..checkpoint.load import ShardedLoad
from ..checkpoint.slices import LocalSlice
from ..device.runtime import instance, logical_core_size
from ..errors import StoreError
from ..modeling import NeuronModel, NeuronModelForCausalLM, local_device
from ..parallel import ParallelConfig
from .client import Pool
from .fetch import Fetch, Wanted
from .grouping import Layer, Stages, early_groups
from .host_files import ArrivingTensor, HostFiles

STAGES = Stages(network_bandwidth=100e9 / 8, copy_bandwidth=12e9, network_latency=50e-6)
"""What groups are planned for unless the caller knows better: network and host-to-device copy of DistMind's tests."""

_BUILDING = threading.Lock()  # transformers' loader exchanges globals while it builds a model: one thread at a time


class StreamingLoad(ShardedLoad):
    """A load that gives the model tensors of arbitrary entries, and keeps which slice of the files goes into each."""

    def __init__(self, parallel_config: ParallelConfig, mesh: Any, device: torch.device, files: HostFiles) -> None:
        super().__init__(parallel_config, mesh, device)
        self.files = files
        self.sources: dict[str, ArrivingTensor] = {}
        self.slices: dict[str, LocalSlice] = {}

    def open_files(self, files: Sequence[str]) -> dict[str, Any]:
        """The tensors of the host files."""
        self.sources = self.files.tensors(files)
        return self.sources

    def local_slice(self, model: PreTrainedModel, name: str, source: Any, dtype: torch.dtype | None) -> Any:
        """What gives an empty tensor for the slice of a source that this rank holds under `name`."""
        self.slices[name] = super().local_slice(model, name, source, dtype)
        return _EmptySlice(self.slices[name])


class _EmptySlice:
    def __init__(self, local: LocalSlice) -> None:
        self.local = local

    def __getitem__(self, index: Any) -> Tensor:
        return self.local.empty()


class StreamedModel:
    """A model of the pool on the local core, its weights on their way.

    Use `.model` at once: before a layer runs, it waits for its weights.  `wait` waits for all of them.  An error of the
    transfer is raised where the model waits.
    """

    def __init__(self, model: PreTrainedModel, load: StreamingLoad, stages: Stages = STAGES) -> None:
        self.model = model
        self.arrived = 0  # bytes that have come over the network
        self.times: dict[str, float] = {}  # when things began and ended, by time.perf_counter
        self.copy_seconds = 0.0  # that the copy to the device has worked
        self.layers = layers_of(model)
        slices, tensors = _slices_by_tensor(model, load)
        order = {id(tensor): index for index, layer in enumerate(self.layers) for tensor in _tensors_in(layer)}
        layer_tensors: list[list[int]] = [[] for _ in self.layers]
        seen = set()
        for layer, held in zip(self.layers, layer_tensors, strict=True):
            for tensor in _tensors_in(layer):
                if id(tensor) in slices and id(tensor) not in seen:  # a tied weight comes with the first that has it
                    seen.add(id(tensor))
                    held.append(id(tensor))
        for key in slices:
            if key not in seen:
                layer_tensors[order.get(key, 0)].append(key)
        wanted = {key: _wanted(local, load.files.touched) for key, local in slices.items()}
        chip = instance().chip  # a forward of few tokens takes as long as reading each weight once
        hbm = chip.hbm_bytes_per_second / chip.logical_cores(logical_core_size())
        costs = [
            Layer(size, size / hbm)
            for size in (sum(len(one.buffer) for key in keys for one in wanted[key]) for keys in layer_tensors)
        ]
        counts = early_groups(costs, stages)
        ends = list(itertools.accumulate(counts))
        self.groups = [
            [key for keys in layer_tensors[end - count : end] for key in keys]
            for end, count in zip(ends, counts, strict=True)
        ]
        self.total = int(sum(cost.size for cost in costs))
        self._group_of = {key: number for number, keys in enumerate(self.groups) for key in keys}
        self._slices, self._tensors = slices, tensors
        self._fetched = [threading.Event() for _ in self.groups]
        self._ready = [threading.Event() for _ in self.groups]
        self._error: Exception | None = None
        self._lock = threading.Lock()
        for source in load.sources.values():
            source.awaited = True
        pool = load.files.pool
        self._fetch = Fetch(
            pool, [[one for key in keys for one in wanted[key]] for keys in self.groups], self._on_group, self._fail,
            self._count,
        )  # fmt: skip
        self._copy = threading.Thread(target=self._copy_groups, name="copy-to-device", daemon=True)
        self._gate = Gate(self)
        self._fetching = self._copying = False

    def prefetch(self) -> StreamedModel:
        """Begin to bring the weights to this host; returns itself."""
        if not self._fetching:
            self._fetching = True
            self.times["start"] = time.perf_counter()
            self._fetch.start()
        return self

    def start(self) -> StreamedModel:
        """Begin to bring the weights to the device; returns itself."""
        self.prefetch()
        if not self._copying:
            self._copying = True
            self._copy.start()
        return self

    def wait(self) -> StreamedModel:
        """Until all weights are there; raises what went wrong, `StoreError` for what the pool lost. Returns itself."""
        self.start()
        for number in range(len(self.groups)):
            self.wait_for_group(number)
        self._fetch.join()
        self._copy.join()
        self._gate.remove()
        return self

    def wait_for_group(self, number: int) -> None:
        """Until a group is on the device; raises what went wrong with the transfer."""
        self._ready[number].wait()
        if self._error is not None:
            raise StoreError(f"The weights of the model did not arrive: {self._error}") from self._error

    def is_ready(self, number: int) -> bool:
        """Whether a group is on the device."""
        return self._ready[number].is_set()

    def groups_of(self, module: nn.Module) -> list[int]:
        """The groups in which the weights of a module, and of those in it, come."""
        return sorted({self._group_of[id(tensor)] for tensor in _tensors_in(module) if id(tensor) in self._group_of})

    def _on_group(self, number: int) -> None:
        self._fetched[number].set()
        self.times["fetched"] = time.perf_counter()

    def _count(self, size: int) -> None:
        with self._lock:
            self.arrived += size

    def _fail(self, error: Exception) -> None:
        self._error = error
        for event in (*self._fetched, *self._ready):
            event.set()

    def _copy_groups(self) -> None:
        try:
            with torch.no_grad():
                for number, keys in enumerate(self.groups):
                    self._fetched[number].wait()
                    if self._error is not None:
                        return
                    begin = time.perf_counter()
                    for key in keys:
                        self._slices[key].copy_to(self._tensors[key])
                    self.copy_seconds += time.perf_counter() - begin
                    self.times.setdefault("first group", time.perf_counter())
                    self._ready[number].set()
            self.times["copied"] = time.perf_counter()
            self._slices = {}  # and with them the memory of the host
        except Exception as error:  # of this thread, whose result the layers wait for
            self._fail(error)


class Gate:
    """Hooks on the modules of a streamed model, each of which waits for the weights of its module.

    A module may read weights of another without calling it.  If a forward ends with layers that it has not called and
    that were not there when it began, it may have read what was not there, and is run again.
    """

    def __init__(self, streamed: StreamedModel) -> None:
        self.streamed = streamed
        self._called: set[int] = set()
        self._late: list[int] = []
        self._handles: list[Any] = []
        self._groups = {index: streamed.groups_of(layer) for index, layer in enumerate(streamed.layers)}
        for index, layer in enumerate(streamed.layers):
            self._handles.append(layer.register_forward_pre_hook(self._hook(index)))
        self._handles.append(streamed.model.register_forward_pre_hook(self._begin, prepend=True))
        self._handles.append(streamed.model.register_forward_hook(self._end, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            self._called.add(index)
            for number in self._groups[index]:
                self.streamed.wait_for_group(number)

        return wait

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.streamed.start()
        self._called = set()
        self._late = [
            index
            for index, groups in self._groups.items()
            if not all(self.streamed.is_ready(number) for number in groups)
        ]

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        uncalled = [index for index in self._late if index not in self._called]
        if self._handles:
            self.streamed.wait()
        return module(*args, **kwargs) if uncalled else output


def stream_model(
    name: str,
    model_class: type[NeuronModel] = NeuronModelForCausalLM,
    parallel_config: ParallelConfig | None = None,
    pool: Pool | None = None,
    stages: Stages = STAGES,
    start: bool = True,
    **kwargs: Any,
) -> StreamedModel:
    """Load a model of the pool as `model_class.from_pretrained` would, and return while its weights are on their way.

    All ranks must call it; each fetches the rows of the files that its shards lie in.  `stages` describes the network
    and the copy that groups of layers are planned for.  Without `start` the caller calls `prefetch()`, which brings the
    weights of the next model to the host, or `start()`, of the result; its memory on the device is taken already.
    Raises as `from_pretrained`, and `StoreError`.
    """
    parallel_config = parallel_config or ParallelConfig()
    if parallel_config.pipeline_parallel_size > 1:
        raise StoreError("Stages of a pipeline are not streamed: load them with from_pretrained('pool://...').")
    mesh = parallel_config.build_mesh() if parallel_config.shares_model else None
    pool = pool or Pool()
    with agreed(f"Looking for {name} in the pool"):
        files = HostFiles(pool, name)
    try:
        load = StreamingLoad(parallel_config, mesh, local_device(), files)
        with agreed(f"Building the model {name}"), _BUILDING:
            result = stock.from_pretrained(model_class.auto_class, load, files.directory.name, **kwargs)
        model_class.finished(load, result)
        assert load.model is not None
        streamed = StreamedModel(load.model, load, stages)
    finally:
        files.close()
    return streamed.start() if start else streamed


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What waits for its weights as a whole, in the order of definition: entries of module lists, and else modules.

    Blocks are whole because what patching puts into them may read weights of modules that it does not call.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if (
            next(module.parameters(recurse=False), None) is not None
            or next(module.buffers(recurse=False), None) is not None
        ):
            found.append(module)
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


def _tensors_in(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _slices_by_tensor(model: nn.Module, load: StreamingLoad) -> tuple[dict[int, LocalSlice], dict[int, Tensor]]:
    """The slice of the files that belongs into each tensor of the model, and the tensor, by its identity."""
    slices: dict[int, LocalSlice] = {}
    tensors: dict[int, Tensor] = {}
    for name, local in load.slices.items():
        owner, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), attribute)
        slices[id(tensor)], tensors[id(tensor)] = local, tensor
    return slices, tensors


def _wanted(local: LocalSlice, touched: list[tuple[ArrivingTensor, tuple[int, int]]]) -> list[Wanted]:
    """What is to be fetched for a slice: found by writing it to a meta tensor, which fills `touched`."""
    touched.clear()
    local.copy_to(torch.empty(local.placement.local_shape(local.rank), device="meta"))
    sources = {id(source): source for source, _ in touched}
    return [
        source.wanted(span)
        for key, source in sources.items()
        for span in _merged([span for one, span in touched if id(one) == key])
        if span[1]
    ]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans (offset, length) in order, those joined that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(spans):
        if merged and offset <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, max(sum(merged[-1]), offset + length) - first)
        else:
            merged.append((offset, length))
    return merged
