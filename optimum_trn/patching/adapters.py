"""PEFT adapters on a patched model: found where PEFT has put them, and made to compute with this rank's shards.

Adapters are PEFT's own, whole on every rank, so that their files, counts and optimizer states are the stock ones at
any layout; only how their layers compute is replaced, on the instances.  PEFT is imported only if there are adapters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from optimum_trn.errors import PlanError
from optimum_trn.parallel.adapters import (
    AdapterDropout,
    ColumnFactorA,
    ColumnFactorB,
    LocalDelta,
    RefusedMixedBatch,
    RowFactorA,
    RowFactorB,
)
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.parallel.conv1d import ColumnParallelConv1D, RowParallelConv1D
from optimum_trn.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from optimum_trn.parallel.linear import ColumnParallelLinear, RowParallelLinear
from optimum_trn.parallel.mesh import RankGroup
from optimum_trn.parallel.replicated import SummedGradientForward
from optimum_trn.parallel.sharding import Placement
from optimum_trn.patching.stages import WRAPPED
from optimum_trn.patching.state import STATE_ATTRIBUTE, PatchState, state_of

COLUMNS = (ColumnParallelLinear, ColumnParallelConv1D)
ROWS = (RowParallelLinear, RowParallelConv1D)
# What PEFT puts between the path of a module and the names of its parameters.
WITHIN_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has wrapped layers of a transformers model."""
    return bool(getattr(model, "peft_config", None)) and any(True for _ in _wrappers(model))


def placements_of(model: nn.Module) -> dict[str, Placement]:
    """Where the sharded parameters of a patched model lie, by the names that they have in `model`.

    Those differ from the stock ones where PEFT has wrapped layers, or the model as a whole.
    """
    state = state_of(model)
    if state is None:
        return {}
    prefix = next(f"{path}." if path else "" for path, inner in model.named_modules() if STATE_ATTRIBUTE in vars(inner))
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    stock = {name: WITHIN_WRAPPERS.sub("", name.removeprefix(prefix)) for name in names}
    return {name: state.placements[path] for name, path in stock.items() if path in state.placements}


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """What PEFT has added to a transformers model: the factors of its adapters, and the copies of `modules_to_save`."""
    added: set[nn.Parameter] = set()
    for _, wrapper in _wrappers(model) if has_adapters(model) else ():
        added |= set(wrapper.parameters()) - set(getattr(wrapper, _wrapped(wrapper)).parameters())
    return added


def parameter_counts(model: nn.Module, without: Collection[str] = ()) -> tuple[int, int]:
    """The numbers of trainable and of all parameters of the whole model, as PEFT counts them in one process.

    In a pipeline, those of this rank's stages; `without` those of the names given.
    """
    placements = placements_of(model)
    sizes = [
        (torch.Size(placements[name].global_shape).numel() if name in placements else parameter.numel(), parameter)
        for name, parameter in model.named_parameters()
        if name not in without
    ]
    return sum(size for size, parameter in sizes if parameter.requires_grad), sum(size for size, _ in sizes)


def adopt_adapters(model: nn.Module) -> None:
    """Makes the adapters that PEFT has added to a patched model since the last time compute with this rank's shards.

    Their values become those of the first rank, everywhere: a collective over all ranks that hold the model, unless
    there is nothing new.  `PlanError` for adapters that do not compute with shards, by name, and for those that a
    model got after its stages were cut: no rank sees all of its layers.
    """
    state = state_of(model)
    if not getattr(model, "peft_config", None) or state is None or not state.actions:
        return
    if state.pipeline is not None:
        state.pipeline.staged.check_adapters()
    _refuse_options(model)
    fresh = _fresh_layers(model, state)
    for path, wrapper in _wrappers(model):
        if path in fresh:
            _adopt_layer(path, wrapper, fresh[path], state)
        if hasattr(wrapper, "original_module"):
            _adopt_copies(WITHIN_WRAPPERS.sub("", path), wrapper, state)
        else:
            _make_equal(wrapper, state)


def watch_for_adapters(model: nn.Module) -> None:
    """Has adapters adopted before the state dicts of a patched model are made or read; its forward does so itself."""
    model.register_state_dict_pre_hook(_adopt_before)
    model.register_load_state_dict_pre_hook(_adopt_before)


def unwatch_for_adapters(model: nn.Module) -> None:
    """Takes back what `watch_for_adapters` did."""
    for hooks in (model._state_dict_pre_hooks, model._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) is _adopt_before:
                del hooks[key]


def _adopt_before(model: nn.Module, *rest: Any) -> None:
    adopt_adapters(model)


def _make_equal(layer: Any, state: PatchState) -> None:
    """Gives the adapters of one layer that have not been seen yet the values that they have on the first rank."""
    device = torch.device("cpu" if state.mesh is None else state.mesh.device_type)
    for name, parameter in layer.named_parameters():
        if "base_layer." in name or parameter.is_meta or hasattr(parameter, "is_adopted"):
            continue
        parameter.is_adopted = True
        value = parameter.detach().to(device)
        for group in (state.tp_group, state.dp_group):
            dist.broadcast(value, group=group, group_src=0)
        with torch.no_grad():
            parameter.copy_(value)


@contextmanager
def adapters_aside(model: nn.Module) -> Iterator[dict[str, Any]]:
    """While active, the layers that PEFT has wrapped are in their old places, so that the model can be patched.

    Afterwards the wrappers, which it gives by their paths, are back, but for those of pipeline stages of other ranks,
    and what `modules_to_save` has copied is sharded like the original.
    """
    taken: dict[str, Any] = {}
    parents: dict[str, nn.Module] = {}
    if getattr(model, "peft_config", None):
        _refuse_options(model)
        paths = [path for path, _ in _wrappers(model)]
        for path, wrapper in list(_wrappers(model)):
            if any(path.startswith(f"{outer}.") for outer in paths):
                raise PlanError(f"{path}: an adapter within a module that modules_to_save copies can't be sharded.")
            taken[path], parents[path] = wrapper, model.get_submodule(path.rpartition(".")[0])
    for path, wrapper in taken.items():
        setattr(parents[path], path.rpartition(".")[2], getattr(wrapper, _wrapped(wrapper)))
    try:
        yield taken
    finally:
        state = state_of(model)
        for path, wrapper in taken.items():
            if state is None or state.pipeline is None or state.pipeline.staged.holds(path):
                setattr(parents[path], path.rpartition(".")[2], wrapper)
    if taken and state is not None:
        _fresh_layers(model, state)  # refuses what is to be refused before more is changed
        _shard_copies(model)
        adopt_adapters(model)


def put_back(model: nn.Module, taken: dict[str, Any]) -> None:
    """The wrappers that `adapters_aside` has left out are in their places again, around the layers that are there."""
    for path, wrapper in taken.items():
        owner, _, name = path.rpartition(".")
        layer = model.get_submodule(path)
        if layer is not wrapper:
            setattr(wrapper, _wrapped(wrapper), layer)
            setattr(model.get_submodule(owner), name, wrapper)


def _wrapped(wrapper: nn.Module) -> str:
    """The name under which a wrapper holds the layer whose place it has taken."""
    return next(name for name in WRAPPED if name in wrapper._modules)


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    for path, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield path, module


def _refuse_options(model: nn.Module) -> None:
    for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]
        for option in ("ensure_weight_tying", "trainable_token_indices"):
            if getattr(config, option, None):
                raise PlanError(f"{option} of the adapter {name!r} is not supported on a model that is sharded.")


def _fresh_layers(model: nn.Module, state: PatchState) -> dict[str, dict[str, Placement]]:
    """The adapted layers, by path, that do not compute with shards yet but should, and where these lie.

    A layer without shards is among them if it sees only a part of the activations.  `PlanError` as `adopt_adapters`.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    fresh: dict[str, dict[str, Placement]] = {}
    layers: list[tuple[str, Any]] = [
        (path, found) for path, found in _wrappers(model) if isinstance(found, BaseTunerLayer)
    ]
    for path, layer in layers:
        base = layer.get_base_layer()
        stock_path = WITHIN_WRAPPERS.sub("", path)
        placements = {name: state.placements.get(f"{stock_path}.{name}") for name, _ in base.named_parameters()}
        sharded = {name: place for name, place in placements.items() if place is not None and place.dim is not None}
        if not sharded and not isinstance(base.__dict__.get("forward"), SummedGradientForward):
            continue  # all ranks compute the same
        if type(layer) not in (lora.Linear, lora.Embedding):
            raise PlanError(f"{path}: {type(layer).__name__} is not supported on a layer that is sharded; LoRA is.")
        for name, variant in layer.lora_variant.items():
            raise PlanError(
                f"{path}: the adapter {name!r} is a {type(variant).__name__}, which is not supported on a layer that "
                "is sharded. Set use_dora=False, and no other variant of LoRA, in its LoraConfig."
            )
        if sharded and not isinstance(base, (*COLUMNS, *ROWS, VocabParallelEmbedding)):
            raise PlanError(f"{path}: LoRA is not supported on a {type(base).__name__} that is sharded by its heads.")
        if "get_delta_weight" not in layer.__dict__ or any("forward" not in a.__dict__ for a in layer.lora_A.values()):
            _check_sizes(path, layer)
            fresh[path] = sharded
    return fresh


def _adopt_layer(path: str, layer: Any, sharded: dict[str, Placement], state: PatchState) -> None:
    """The adapters of one layer compute with this rank's shard, or sum the gradients that they see parts of."""
    base = layer.get_base_layer()
    if sharded and "get_delta_weight" not in layer.__dict__:
        layer.get_delta_weight = LocalDelta(layer, sharded["weight"])
        layer._mixed_batch_forward = RefusedMixedBatch(path)
        if isinstance(base, (VocabParallelEmbedding, ParallelLMHead)):  # PEFT saves them beside their adapters
            _whole_in_state_dicts(layer, {f"base_layer.{name}": placement for name, placement in sharded.items()})
    for name in layer.lora_A:
        a, b = layer.lora_A[name], layer.lora_B[name]
        if "forward" in a.__dict__:
            continue
        if not sharded:
            assert state.tp_group is not None
            a.forward, b.forward = (SummedGradientForward(factor, RankGroup(state.tp_group)) for factor in (a, b))
            continue
        kinds = (ColumnFactorA, ColumnFactorB) if isinstance(base, COLUMNS) else (RowFactorA, RowFactorB)
        a.forward, b.forward = (
            kind(factor, base, sharded["weight"]) for kind, factor in zip(kinds, (a, b), strict=True)
        )
        dropout = layer.lora_dropout[name]
        dropout.forward = AdapterDropout(dropout, base)


def _check_sizes(path: str, layer: Any) -> None:
    """`PlanError` for factors that were made from this rank's shard of a weight as if it were the weight."""
    factors = {name: (a.weight, layer.lora_B[name].weight) for name, a in layer.lora_A.items()}
    factors |= {name: (a, layer.lora_embedding_B[name]) for name, a in layer.lora_embedding_A.items()}
    for name, (a, b) in factors.items():
        if (a.shape[1], b.shape[0]) != (layer.in_features, layer.out_features):
            raise PlanError(
                f"{path}: the adapter {name!r} has {a.shape[1]} inputs and {b.shape[0]} outputs where the layer has "
                f"{layer.in_features} and {layer.out_features}: its init_lora_weights took this rank's shard for the "
                "whole weight. Add the adapter to the stock model, and give that to NeuronTrainer."
            )


def _adopt_copies(path: str, wrapper: Any, state: PatchState) -> None:
    """What `modules_to_save` has copied of a patched model computes as the original does; its files become whole."""
    original = wrapper.original_module
    placements = {name: state.placements.get(f"{path}.{name}") for name, _ in original.named_parameters()}
    sharded = {name: placement for name, placement in placements.items() if placement and placement.dim is not None}
    _whole_in_state_dicts(
        wrapper,
        {
            f"modules_to_save.{adapter}.{name}": placement
            for adapter in wrapper.modules_to_save
            for name, placement in sharded.items()
        },
    )


def _shard_copies(model: nn.Module) -> None:
    """What `modules_to_save` had copied before the model was patched becomes a copy of the patched original."""
    from peft.utils import ModulesToSaveWrapper

    state = state_of(model)
    assert state is not None
    for path, wrapper in _wrappers(model):
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for adapter, old in list(wrapper.modules_to_save.items()):
            new = copy.deepcopy(wrapper.original_module).train(old.training)
            for name, parameter in old.named_parameters():
                placement = state.placements[f"{path}.{name}"]
                with torch.no_grad():
                    parameter.data = placement.shard(parameter.data, state.tp_rank)
                owner, _, attribute = name.rpartition(".")
                new.get_submodule(owner)._parameters[attribute] = parameter
            for name, buffer in old.named_buffers():
                new.get_buffer(name).copy_(buffer)
            wrapper.modules_to_save[adapter] = new


def _whole_in_state_dicts(module: Any, placements: dict[str, Placement]) -> None:
    """Has the named tensors of one module be whole in the state dicts that it gives and takes; a collective, then."""
    if not placements:
        return
    if "whole_in_state_dicts" not in module.__dict__:
        module.register_state_dict_post_hook(_gather)
        module.register_load_state_dict_pre_hook(_cut)
    module.whole_in_state_dicts = placements


def _gather(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, placement in module.whole_in_state_dicts.items():
        if prefix + name in state_dict:
            group = _group_of(module)
            state_dict[prefix + name] = unshard_from_group(state_dict[prefix + name], placement, group.process_group)


def _cut(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, placement in module.whole_in_state_dicts.items():
        tensor = state_dict.get(prefix + name)
        if tensor is not None and tuple(tensor.shape) == placement.global_shape:
            state_dict[prefix + name] = placement.shard(tensor, _group_of(module).rank)


def _group_of(module: nn.Module) -> RankGroup:
    return next(group for inner in module.modules() if isinstance(group := getattr(inner, "group", None), RankGroup))
