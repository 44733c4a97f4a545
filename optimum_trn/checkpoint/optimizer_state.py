"""The states of an optimizer as whole tensors by the names of the parameters, whatever part of them this rank has.

One safetensors file holds `NAME/STATE` for every state of every parameter, in the shape of the parameter in the stock
model; states of other shapes, such as counters, as they are. `NAME/master` is the float32 weight of a parameter that
the model has in a lower precision. Options of the groups and states that are no tensors are JSON in its metadata.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..parallel import Placement
from ..parallel.mics import COMPUTE_DTYPE, own_part
from ..parallel.whole_parameters import cut_parameters
from ..parallel.zero1 import LOW_PRECISION, Zero1Optimizer
from ..patching import state_of
from ..patching.adapters import placements_of
from .agreement import is_first_rank, of_all_ranks
from .pieces import Held, pieces
from .shared_files import SharedFiles
from .slices import Stored, open_slices

FILE_NAME = "optimizer.safetensors"
MASTER = "master"
METADATA = "optimum_trn"


@dataclass(frozen=True)
class Part:
    """What a parameter of an optimizer is: a run of what this rank has of a parameter of the model.

    `names` are all that it goes by where weights are tied; `writes` is False if an earlier rank has the same. With
    `is_whole` the optimizer sees the whole of what others have shards of, and its states are whole here.
    """

    parameter: Tensor
    names: tuple[str, ...]
    start: int
    placement: Placement
    rank: int
    writes: bool
    has_master: bool
    is_whole: bool = False

    @property
    def begins(self) -> bool:
        """Whether what is not cut is written with this part."""
        return self.writes and self.start == 0 and self.rank == 0


def parts_of(optimizer: Any, model: nn.Module) -> list[list[Part]]:
    """The parts that the parameters of an optimizer are, group by group; `CheckpointError` for one of another model."""
    return _parts(optimizer, model, [group["params"] for group in optimizer.param_groups])


def _masters_of(optimizer: Any, model: nn.Module) -> list[Part]:
    """Shards of parameters that the optimizer sees whole, of which this rank may have master weights."""
    return _parts(optimizer, model, [[cut.local for cut in cut_parameters(optimizer)]])[0]


def _parts(optimizer: Any, model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[list[Part]]:
    state, placements = state_of(model), placements_of(model)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    sharded = isinstance(optimizer, Zero1Optimizer)
    spans = {id(part): span for span, part in optimizer.parts.items()} if sharded else {}
    staged = state.pipeline.staged if state is not None and state.pipeline is not None else None
    elsewhere = staged.duplicates() if staged is not None else set()
    experts = set(map(id, state.experts.placements.values())) if state is not None and state.experts else set()

    cuts = {id(cut.whole): cut for cut in cut_parameters(optimizer)}

    def part_of(parameter: Tensor) -> Part:
        cut = cuts.get(id(parameter))
        span = spans.get(id(parameter if cut is None else cut.local))
        whole: Tensor = optimizer.parameters[span.name] if span is not None else parameter
        whole = cut.local if cut is not None and span is None else whole
        if id(whole) not in names:
            raise CheckpointError(
                f"The optimizer holds a parameter of shape {tuple(whole.shape)} that is not one of the model: its "
                "states can't be saved by name. Make it part of the model."
            )
        found = names[id(whole)]
        placement = placements.get(found[0]) or Placement.replicate(whole.shape, 1)
        rank, first_copy = 0, is_first_rank()
        if state is not None and state.mesh is not None:
            in_experts = id(placement) in experts
            rank = state.experts.group.rank if in_experts and state.experts is not None else state.tp_rank
            copies = state.mesh.get_group("dp_replicate" if state.mesh["dp_shard"].size() > 1 else "dp_cp")
            if in_experts and state.experts is not None:
                copies = state.experts.replicas
            first_copy = dist.get_rank(copies) == 0
        start = span.start if span is not None else own_part(whole)[1]
        if cut is not None:
            # One rank of those that it is cut over has it whole; without shards, so has each tensor-parallel rank.
            placement, rank, start = Placement.replicate(cut.shape, 1), 0 if cut.shards is not None else rank, 0
        aliases = [other for name in found for other in (staged.stages.aliases.get(name, ()) if staged else ())]
        return Part(
            parameter,
            tuple(dict.fromkeys([*found, *aliases])),
            start,
            placement,
            rank,
            (span is not None or first_copy) and elsewhere.isdisjoint(found),
            has_master=cut is None
            and ((span is not None and whole.dtype in LOW_PRECISION) or hasattr(model, COMPUTE_DTYPE)),
            is_whole=cut is not None,
        )

    return [[part_of(parameter) for parameter in group] for group in groups]


def add_optimizer(files: SharedFiles, optimizer: Any, model: nn.Module) -> None:
    """Note the states of an optimizer in a checkpoint; a collective over the world."""
    boxes: dict[str, list[Any]] = defaultdict(list)
    described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    values: dict[str, Any] = {}
    parts = [part for group in parts_of(optimizer, model) for part in group]
    for part in (*parts, *_masters_of(optimizer, model)):
        for key, value in _states(optimizer, part):
            name = f"{part.names[0]}/{key}"
            if not isinstance(value, Tensor):
                if part.begins:
                    values[name] = value
                continue
            local = _local(value).detach()
            if local.shape == _local(part.parameter).shape:
                found = [
                    (box, view)
                    for box, view, first in pieces(local.contiguous(), part.start, part.placement, part.rank)
                    if first and part.writes
                ]
                shape = part.placement.global_shape
            else:
                shape = tuple(local.shape)
                found = [(tuple((0, size) for size in shape), local)] if part.begins else []
            if found:
                boxes[name] += found
                described[name] = shape, local.dtype
    groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for of_rank, values_of_rank in of_all_ranks((described, values)):
        described |= of_rank
        values |= values_of_rank
    tensors = {
        name: Held(shape, dtype, boxes.get(name, ()), files.write) for name, (shape, dtype) in sorted(described.items())
    }
    metadata = {METADATA: json.dumps({"groups": groups, "values": values})}
    files.add(FILE_NAME, tensors, metadata, header=is_first_rank())


@torch.no_grad()
def load_optimizer(optimizer: Any, model: nn.Module, directory: Path) -> None:
    """Give an optimizer the states of a checkpoint, each rank its own parts, wherever they were when it was saved.

    Raises `CheckpointError` if they are those of another model or of other groups.
    """
    file = directory / FILE_NAME
    by_name: dict[str, dict[str, Any]] = defaultdict(dict)
    for entry, source in open_slices([str(file)]).items():
        name, _, key = entry.rpartition("/")
        by_name[name][key] = Stored(source)
    with safe_open(str(file), framework="pt") as handle:
        rest = json.loads(handle.metadata()[METADATA])
    for entry, value in rest["values"].items():
        name, _, key = entry.rpartition("/")
        by_name[name][key] = value
    give_states(optimizer, model, by_name, rest["groups"], str(file))


def load_stock_optimizer(optimizer: Any, model: nn.Module, file: Path, order: Sequence[str] | None) -> None:
    """Give an optimizer the states in a file of transformers, whose parameters are in `order`.

    Raises `CheckpointError` as `load_optimizer`, and if the order is not known.
    """
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    order = order or [part.names[0] for group in parts_of(optimizer, model) for part in group]
    if len(set(order)) != sum(len(group["params"]) for group in saved["param_groups"]):
        raise CheckpointError(
            f"{file} does not say which parameter each of its states belongs to. Resume once in one process with "
            "NeuronTrainer and save: its checkpoints can be resumed at any layout."
        )
    by_name = {
        order[index]: {k: Stored(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        for index, state in saved["state"].items()
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    give_states(optimizer, model, by_name, groups, str(file))


def give_states(
    optimizer: Any, model: nn.Module, by_name: Mapping[str, Mapping[str, Any]], options: Any, origin: str
) -> None:
    """Give an optimizer its part of whole states (lazy tensors, or values) by parameter name, and groups' options."""
    parts = parts_of(optimizer, model)
    if len(options) != len(parts):
        raise CheckpointError(
            f"{origin} has {len(options)} parameter groups and the optimizer {len(parts)}: it is of another run."
        )
    states: dict[int, dict[str, Any]] = {}
    flat = [part for group in parts for part in group]
    if flat and by_name and not any(name in by_name for part in flat for name in part.names):
        raise CheckpointError(
            f"{origin} holds no state of {flat[0].names[0]} or any other parameter: of another model?"
        )
    optimizer.state.clear()  # so that there is no need to hold the states twice
    for index, part in enumerate(flat):
        saved = next((by_name[name] for name in part.names if name in by_name), {})
        for key, source in saved.items():
            value = _read(source, part) if isinstance(source, Stored) else source
            if key != MASTER:
                states.setdefault(index, {})[key] = value
            elif part.has_master:
                _local(part.parameter).copy_(_local(value))
    for part in _masters_of(optimizer, model):
        master = next((by_name[name][MASTER] for name in part.names if MASTER in by_name.get(name, {})), None)
        if part.has_master and master is not None:
            _local(part.parameter).copy_(_local(_read(master, part)))
    groups, index = [], 0
    for saved, group, members in zip(options, optimizer.param_groups, parts, strict=True):
        restored = {key: _like(group[key], value) if key in group else value for key, value in saved.items()}
        groups.append({**group, **restored, "params": list(range(index, index + len(members)))})
        index += len(members)
    inner = optimizer.optimizer if isinstance(optimizer, Zero1Optimizer) else optimizer
    inner.load_state_dict({"state": states, "param_groups": groups})


def _states(optimizer: Any, part: Part) -> Iterator[tuple[str, Any]]:
    yield from optimizer.state.get(part.parameter, {}).items()
    if part.has_master:
        yield MASTER, part.parameter


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read(source: Stored, part: Part) -> Tensor:
    """This part's entries of a whole state, as the parameter lies; or all of a state that has another shape."""
    like = part.parameter
    if part.is_whole or tuple(source.shape) != part.placement.global_shape:
        return source[...]
    local = torch.zeros(_local(like).shape, dtype=source.dtype, device=like.device)
    for box, view, _ in pieces(local, part.start, part.placement, part.rank):
        source.copy_to(view, box)
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _like(current: Any, value: Any) -> Any:
    """An option that went through JSON, of the type that it has in the optimizer."""
    if isinstance(current, Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value
