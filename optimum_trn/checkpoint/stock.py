"""The one place that touches the inside of transformers' loader and saver: steers them, and asks them for names.

transformers 5.24 resolves names, revisions, caches, configs, dtypes, renamed keys, tied weights, generation configs and
reports; none of that is repeated here.  A subclass of the model class, which exists for one call only, overrides four
methods of the loader; the instance it makes is given the stock class back before the call returns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import _add_variant, load_state_dict, remove_tied_weights_from_state_dict

from ..errors import CheckpointError, UnsupportedModelError
from ..parallel.mics import dtype_of
from .deferred_init import EmptyOnMeta
from .lazy import LazyTensor
from .load import ShardedLoad, drop_tied_duplicates, mismatched_shapes, named_tensors
from .slices import Stored

T = TypeVar("T", torch.Tensor, LazyTensor)

# What transformers would place or convert by itself, in ways that a sharded model does not take.
REFUSED = {
    "device_map": "the parallel layout says what each NeuronCore holds",
    "distributed_config": "ParallelConfig takes its place",
    "tp_plan": "ParallelConfig takes its place",
    "tp_size": "ParallelConfig(tensor_parallel_size=...) takes its place",
    "device_mesh": "ParallelConfig takes its place",
    "state_dict": "weights are read from files, slice by slice",
    "quantization_config": "quantised weights cannot be trained in parallel",
    "gguf_file": "convert it once with examples/convert_gguf.py and load the result",
}


def from_pretrained(auto_class: type[AutoModel], load: ShardedLoad, name: Any, **kwargs: Any) -> Any:
    """`auto_class.from_pretrained(name, ...)`, carried out by `load`; returns what that returns.

    Pickled weights are read only if the caller passes `use_safetensors=False`; code of the repository runs only with
    `trust_remote_code=True`, without a question at the terminal, which many ranks would ask.
    """
    for argument, reason in REFUSED.items():
        if kwargs.get(argument) is not None:
            raise CheckpointError(f"from_pretrained does not take {argument}={kwargs[argument]!r} here: {reason}.")
    kwargs = _safe(kwargs)
    steered = functools.partial(_steered_model_class, load=load)
    try:
        result = _steered_auto_class(auto_class, steered).from_pretrained(name, **kwargs)
    except SafetensorError as error:  # before the files were opened by us: their dtype is looked up first
        raise CheckpointError(f"A weight file of {name} is cut short or damaged ({error}). Get it again.") from error
    model = result[0] if isinstance(result, tuple) else result
    if load.shards and model.__dict__.get("_hf_peft_config_loaded"):
        raise UnsupportedModelError(
            f"{name} is an adapter. Load its base model, and then peft.PeftModel.from_pretrained(model, {name!r})."
        )
    _accept_remote_code(load, model)
    return result


def fetch(auto_class: type[AutoModel], load: ShardedLoad, name: Any, **kwargs: Any) -> None:
    """Bring into the local cache what `from_pretrained` with the same arguments reads, and no other file."""
    kwargs.pop("output_loading_info", None)
    steered = functools.partial(_model_class_without_weights, load=load)
    _steered_auto_class(auto_class, steered).from_pretrained(name, **_safe(kwargs))


def _safe(kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {"use_safetensors": True, "trust_remote_code": False}
    return {**kwargs, **{name: value for name, value in defaults.items() if kwargs.get(name) is None}}


def from_config(auto_class: type[AutoModel], load: ShardedLoad, config: Any, **kwargs: Any) -> PreTrainedModel:
    """`auto_class.from_config(config, ...)`, initialised in one stream at every layout and cut by `load`."""
    model = _steered_auto_class(auto_class, functools.partial(_steered_model_class, load=load)).from_config(
        config, **kwargs
    )
    _accept_remote_code(load, model)
    return cast(PreTrainedModel, model)


def _accept_remote_code(load: ShardedLoad, model: Any) -> None:
    """A class that came with the checkpoint is not steered: whole it is welcome, cut it cannot be."""
    if load.model is not model:
        if load.shards:
            raise UnsupportedModelError(
                f"{type(model).__name__} is remote code, which no plan describes. Use tensor_parallel_size=1."
            )
        load.model = model.to(load.device)


class _SteeredMapping:
    """The config-to-model mapping of an auto class, giving steered model classes."""

    def __init__(self, stock: Any, steer: Callable[[Any], Any]) -> None:
        self.stock = stock
        self.steer = steer

    def __contains__(self, config_class: type) -> bool:
        return config_class in self.stock

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stock)

    def register(self, *args: Any, **kwargs: Any) -> None:
        """Remote code registers its class with transformers, as it would without us."""
        self.stock.register(*args, **kwargs)

    def __getitem__(self, config_class: type) -> Any:
        found = self.stock[config_class]
        if isinstance(found, list | tuple):
            return [self.steer(model_class) for model_class in found]
        return self.steer(found)


def _steered_auto_class(auto_class: Any, steer: Callable[[Any], Any]) -> Any:
    # The same name, by which a config's auto_map is looked up.
    return type(
        auto_class.__name__, (auto_class,), {"_model_mapping": _SteeredMapping(auto_class._model_mapping, steer)}
    )


def _model_class_without_weights(stock: Any, load: ShardedLoad) -> Any:
    """A subclass of a stock model class whose loader finds all files, downloads them, and reads no weights."""

    def from_pretrained(cls: Any, /, *args: Any, config: Any, **kwargs: Any) -> Any:
        load.validate(config, stock)  # before anything large is downloaded
        return stock.from_pretrained.__func__(cls, *args, config=config, **kwargs)

    namespace = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "from_pretrained": classmethod(from_pretrained),
        "_load_pretrained_model": staticmethod(lambda *_: (None, None)),
        "_finalize_model_loading": staticmethod(lambda *_: None),
    }
    return type(stock.__name__, (stock,), namespace)


def _steered_model_class(stock: Any, load: ShardedLoad) -> Any:
    """A subclass of a stock model class whose loader methods are those of `load`."""

    def from_pretrained(cls: Any, /, *args: Any, config: Any, **kwargs: Any) -> Any:
        load.validate(config, stock)
        return stock.from_pretrained.__func__(cls, *args, config=config, **kwargs)

    def from_config(cls: Any, /, config: Any, **kwargs: Any) -> Any:
        load.validate(config, stock)
        with load.shared_generator(), load.init, EmptyOnMeta():
            model = stock._from_config(config, **kwargs)
        load.remember(model)
        load.patch(model)
        load.fill(model, list(named_tensors(model)))
        load.model = model
        return model

    def load_pretrained_model(
        model: Any, state_dict: None, checkpoint_files: list[str], load_config: Any, expected_keys: Any = None
    ) -> Any:
        if load_config.hf_quantizer is not None:
            raise UnsupportedModelError(
                f"{load_config.pretrained_model_name_or_path} is quantised, which cannot be trained."
            )
        conversions = load_config.weight_mapping or []
        present, sources = tensors_in_model(model, _open(checkpoint_files, load_config, load), conversions)
        drop_tied_duplicates(model, present)
        mismatched = mismatched_shapes(model, present, load_config.ignore_mismatched_sizes)
        for target, _, _ in mismatched:
            del present[target]
        load.draw_missing(model, set(present))
        load.patch(model)
        present = load.own(model, present)
        if expected_keys is not None:
            expected_keys = [key for key in expected_keys if key in named_tensors(model)]
        for target, source in present.items():
            # With exceptions to the dtype, transformers casts after the slice has been read.
            dtype = None if load_config.dtype_plan else model.get_parameter_or_buffer(target).dtype
            sources[target] = load.local_slice(model, target, source, dtype)
        unconverted = replace(load_config, device_map={"": load.device}, weight_mapping=[])
        info, offload_index = stock._load_pretrained_model(model, sources, None, unconverted, expected_keys)
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]
        info.mismatched_keys |= mismatched
        info.missing_keys -= {target for target, _, _ in mismatched}
        return info, offload_index

    def move_missing_keys(model: Any, missing_keys: set[str], *_: Any) -> None:
        names = missing_keys - model.all_tied_weights_keys.keys()
        load.fill(model, [*names, *(name for name, _ in model.named_non_persistent_buffers())])

    def finalize_model_loading(model: Any, load_config: Any, info: Any) -> Any:
        info = stock._finalize_model_loading(model, load_config, info)
        model.__class__ = stock
        load.model = model
        return info

    namespace = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "from_pretrained": classmethod(from_pretrained),
        "_from_config": classmethod(from_config),
        "_load_pretrained_model": staticmethod(load_pretrained_model),
        "_move_missing_keys_from_meta_to_device": move_missing_keys,
        "_initialize_missing_keys": lambda model, is_quantized: None,  # they have been drawn
        "_finalize_model_loading": staticmethod(finalize_model_loading),
    }
    return type(stock.__name__, (stock,), namespace)


def _open(checkpoint_files: list[str], load_config: Any, load: ShardedLoad) -> dict[str, Any]:
    """Name to lazy source, over all files: safetensors, or pickles if the caller asked for them."""
    if checkpoint_files[0].endswith(".safetensors"):
        return load.open_files(checkpoint_files)
    sources: dict[str, Any] = {}
    for file in checkpoint_files:
        sources.update(load_state_dict(file, weights_only=load_config.weights_only))
    return sources


def tensors_in_model(
    model: Any, sources: Mapping[str, Any], conversions: Sequence[WeightTransform]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name in the model what a checkpoint's tensors make of it, and what the checkpoint holds besides.

    The model must be whole.  Raises `UnsupportedModelError` if a conversion does more than move entries.
    """
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, torch.Tensor] = model.state_dict()
    found: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    conversion_of: dict[str, WeightConverter] = {}
    for key in sorted(sources, key=dot_natural_key):  # in which the experts are in order
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if target not in names and key in names:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        if target not in names:
            patterns = by_pattern[pattern].target_patterns if pattern is not None else [target]
            unknown.update((target.replace(patterns[0], other), sources[key]) for other in patterns)
        elif pattern is None:
            found.setdefault(target, sources[key])
        else:
            if target not in conversion_of:
                conversion_of[target] = copy.deepcopy(by_pattern[pattern])
            conversion_of[target].add_tensor(target, key, pattern, Stored(sources[key]))  # type: ignore[arg-type]
    for target, converter in conversion_of.items():
        converted = converter.convert(target, model=model, config=model.config)
        found.update((name, value[0] if isinstance(value, list) else value) for name, value in converted.items())
    return found, unknown


def tensors_from_files(model: Any, sources: Mapping[str, Any]) -> dict[str, Any]:
    """By name in the model what the files make of it that were saved from this model, or from its like."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    found, unknown = tensors_in_model(model, sources, conversions)
    return {**unknown, **found}


def with_variant(file_name: str, variant: str | None) -> str:
    """The name of a weight file or index of a variant, such as "fp16"."""
    name: str = _add_variant(file_name, variant)
    return name


def without_tied_duplicates(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict as far as it goes into files: tied weights once, under the name that the class wants to find."""
    for name in model._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    kept: dict[str, torch.Tensor] = remove_tied_weights_from_state_dict(tensors, model)
    return kept


def tensors_in_files(model: PreTrainedModel, tensors: dict[str, T]) -> dict[str, T]:
    """By name in the stock files what these hold, of the model's whole tensors by name: the load's conversions undone.

    Raises `UnsupportedModelError` if lazy tensors are given and they do more than move entries.
    """
    in_files: dict[str, T] = revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
    return in_files


def write_configs(model: PreTrainedModel, directory: str) -> None:
    """Write config.json and, for models that generate, generation_config.json, as `save_pretrained` does."""
    model.config.dtype = str(dtype_of(model)).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # of the class that FSDP2 makes of it
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
