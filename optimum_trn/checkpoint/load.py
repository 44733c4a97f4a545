"""Loads a stock checkpoint into a tensor-parallel model: each rank reads only its own slices of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import CheckpointError
from ..parallel import ParallelConfig, Placement
from ..patching import patch_model, pipeline_of, plan_for, state_of
from ..patching.stage_plan import validate_stages
from .deferred_init import DeferredInit
from .slices import LocalSlice, open_slices, same_values, shape_of

logger = logging.get_logger(__name__)


class ShardedLoad:
    """One load, on one rank: patches the stock model while it is on the meta device, then fills it slice by slice.

    checkpoint/stock.py calls its methods from within transformers' own loader, in the order in which they stand here.
    `device` is where the local tensors end up.  Weights that the checkpoint lacks are drawn from the CPU generator, in
    the state in which rank 0 of the world had it at construction (a collective), so that all layouts draw the same.
    """

    def __init__(self, parallel_config: ParallelConfig, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.parallel_config = parallel_config
        self.mesh = mesh
        self.device = device
        self.values: dict[str, Tensor] = {}  # of the whole model on the meta device, by name; what to draw later
        self.ties: dict[str, str] = {}  # of the whole model: a pipeline stage may have only the name that is tied
        self.init = DeferredInit()
        self.model: PreTrainedModel | None = None  # the model that came out of it
        self._generator_state = torch.get_rng_state()
        self._shared_generator_state = _of_first_rank(self._generator_state)

    @property
    def shards(self) -> bool:
        """Whether the model is cut at all."""
        return self.parallel_config.shares_model

    def validate(self, config: Any, model_class: type[PreTrainedModel]) -> None:
        """Raise `UnsupportedModelError` or `PlanError`, before anything is read, if the layout does not suit."""
        if self.shards:
            plan = plan_for(config, model_class)
            plan.validate(config, self.parallel_config.tensor_parallel_size)
            validate_stages(plan, config, self.parallel_config.num_stages)

    def open_files(self, files: Sequence[str]) -> dict[str, Any]:
        """Name to lazy source, over all safetensors files; `CheckpointError` as `open_slices`."""
        return open_slices(files)

    def draw_missing(self, model: PreTrainedModel, present: set[str]) -> None:
        """Record how the stock class, still whole and on meta, initialises what is not `present` in the checkpoint."""
        tied = set(model.all_tied_weights_keys)
        for name, tensor in named_tensors(model).items():
            if name in present or name in tied:
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        with self.shared_generator(), self.init:
            model.initialize_weights()
        self.remember(model)

    def remember(self, model: PreTrainedModel) -> None:
        """Keep the whole tensors under their names: patching will cut those of the model."""
        self.values = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        self.ties = dict(model.all_tied_weights_keys)

    def patch(self, model: PreTrainedModel) -> None:
        """Cut the model to this rank's part."""
        if self.shards:
            patch_model(model, self.parallel_config, self.mesh)

    def own(self, model: PreTrainedModel, present: Mapping[str, Any]) -> dict[str, Any]:
        """Of the sources by name, those of this rank's stages; a tied weight may have lost its source there."""
        if pipeline_of(model) is None:
            return dict(present)
        names = {name: name for name in named_tensors(model) if name in present}
        names |= {
            name: source
            for name, source in self.ties.items()
            if source in present and name not in model.all_tied_weights_keys and name in named_tensors(model)
        }
        return {name: present[source] for name, source in names.items()}

    def local_slice(self, model: PreTrainedModel, name: str, source: Any, dtype: torch.dtype | None) -> Any:
        """The lazy slice of a source that this rank holds under `name`."""
        placement, rank = self._placement(model, name, shape_of(source))
        return LocalSlice(source, placement, rank, self.device, dtype)

    def fill(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        """Give the named parameters and buffers, which were not in the checkpoint, the values of the stock class."""
        filled: dict[int, Tensor] = {}
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            current = getattr(module, attribute)
            if id(current) not in filled:
                whole = self.init.draw(self.values[self.ties.get(name, name)])
                placement, rank = self._placement(model, name, whole.shape)
                local = LocalSlice(whole, placement, rank, self.device, current.dtype)[...]
                if isinstance(current, nn.Parameter):
                    local = nn.Parameter(local, requires_grad=current.requires_grad)
                local._is_hf_initialized = True  # type: ignore[attr-defined]
                filled[id(current)] = local
            setattr(module, attribute, filled[id(current)])

    def _placement(self, model: PreTrainedModel, name: str, shape: Sequence[int]) -> tuple[Placement, int]:
        state = state_of(model)
        if state is None or name not in state.placements:
            return Placement.replicate(shape, self.parallel_config.tensor_parallel_size), 0
        return state.placements[name], state.rank_of(name)

    def shared_generator(self) -> _SharedGenerator:
        """While active, the CPU generator is where rank 0's was when the load began."""
        return _SharedGenerator(self._generator_state, self._shared_generator_state)


class _SharedGenerator:
    """Swaps the CPU generator's state in and, on ranks that were in another one, out again."""

    def __init__(self, own: Tensor, shared: Tensor) -> None:
        self.own = own
        self.shared = shared

    def __enter__(self) -> None:
        torch.set_rng_state(self.shared)

    def __exit__(self, *error: object) -> None:
        if not torch.equal(self.own, self.shared):
            torch.set_rng_state(self.own)


def _of_first_rank(state: Tensor) -> Tensor:
    if not dist.is_initialized():
        return state
    states = [state]
    dist.broadcast_object_list(states, src=0)
    return states[0]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it goes by, non-persistent buffers included."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def drop_tied_duplicates(model: PreTrainedModel, sources: dict[str, Any]) -> None:
    """Decide on whole tensors, the same on every rank, whether weights that are stored twice are tied.

    transformers compares the two, too, but it would compare shards, which may be equal on some ranks only.  Equal ones
    are read once; different ones are not tied, with a warning, as in transformers.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in sources or source not in sources:
            continue
        if same_values(sources[target], sources[source]):
            del sources[target]
        else:
            logger.warning(
                f"The config ties {target} to {source}, but the checkpoint holds different values for them: they will "
                f"not be tied. Set tie_word_embeddings=False in the config to silence this warning."
            )
            del model.all_tied_weights_keys[target]


def mismatched_shapes(
    model: PreTrainedModel, sources: Mapping[str, Any], ignore_mismatched_sizes: bool
) -> set[tuple[str, torch.Size, torch.Size]]:
    """(name, shape in the checkpoint, shape in the model) of the tensors that do not fit, all shapes whole.

    Raises `CheckpointError` that names them, unless `ignore_mismatched_sizes`.
    """
    tensors = named_tensors(model)
    mismatched = {
        (name, torch.Size(shape_of(source)), tensors[name].shape)
        for name, source in sources.items()
        if tuple(shape_of(source)) != tuple(tensors[name].shape)
    }
    if mismatched and not ignore_mismatched_sizes:
        shown = "; ".join(
            f"{name} is {tuple(a)} in the checkpoint and {tuple(b)} in the model"
            for name, a, b in sorted(mismatched)[:3]
        )
        raise CheckpointError(
            f"{len(mismatched)} weights of the checkpoint do not fit {type(model).__name__}: {shown}. Load it with the "
            f"config it was saved with, or pass ignore_mismatched_sizes=True to initialise these weights anew."
        )
    return mismatched
