"""Auto classes that load stock models onto NeuronCores, each rank its own shards."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from .checkpoint import stock
from .checkpoint.agreement import agreed
from .checkpoint.hub import downloaded_once
from .checkpoint.load import ShardedLoad
from .checkpoint.remote import downloaded, is_remote
from .checkpoint.save import save_pretrained
from .device import device_type
from .errors import CheckpointError
from .parallel import ParallelConfig


class NeuronModel:
    """Loads or builds base models: instances of the stock class, sharded, on the local device."""

    auto_class: Any = AutoModel

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        parallel_config: ParallelConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """What `from_pretrained` of the stock auto class returns for the same arguments, sharded, on the local core.

        All ranks must call it. Of a Hub id, the first rank of each host downloads what is missing in its cache while
        the others wait; a URL that fsspec reads, such as `pool://name`, it copies to a temporary directory. Each reads
        only its own slices of the safetensors files; weights that they lack are initialised as the stock class would,
        the same at every layout. Without `parallel_config`, or in one process, it is the stock model. The model's
        `save_pretrained` writes stock files and must be called on all ranks, too.

        Raises, on every rank and before any weight is read: `MeshError` (degrees and world size), `PlanError` (sizes
        that do not divide), `UnsupportedModelError` (no plan for the model type); and `CheckpointError` or `OSError`
        (files missing or damaged, weights that do not fit).
        """
        if is_remote(str(pretrained_model_name_or_path)):
            with downloaded(str(pretrained_model_name_or_path)) as directory:
                return cls.from_pretrained(directory, parallel_config, **kwargs)
        load = cls._load(parallel_config)
        kwargs = downloaded_once(cls.auto_class, load, pretrained_model_name_or_path, kwargs)
        with agreed(f"Loading {pretrained_model_name_or_path}"):
            path = Path(pretrained_model_name_or_path)
            if path.is_absolute() and not path.exists():  # the stock class takes it for the id of a Hub repository
                raise CheckpointError(f"{path} does not exist. Give the directory of a saved model, or a Hub id.")
            result = stock.from_pretrained(cls.auto_class, load, pretrained_model_name_or_path, **kwargs)
        return cls.finished(load, result)

    @classmethod
    def from_config(cls, config: Any, parallel_config: ParallelConfig | None = None, **kwargs: Any) -> Any:
        """What `from_config` of the stock auto class returns for the same arguments, sharded, on the local core.

        All ranks must call it.  The weights are those that one process would draw from the state of rank 0's CPU
        generator, at every layout, and no rank ever holds more than one of them whole.  Raises as `from_pretrained`.
        """
        load = cls._load(parallel_config)
        with agreed(f"Building a model of type {config.model_type}"):
            result = stock.from_config(cls.auto_class, load, config, **kwargs)
        return cls.finished(load, result)

    @staticmethod
    def _load(parallel_config: ParallelConfig | None) -> ShardedLoad:
        parallel_config = parallel_config or ParallelConfig()
        mesh = parallel_config.build_mesh() if parallel_config.shares_model else None
        return ShardedLoad(parallel_config, mesh, local_device())

    @staticmethod
    def finished(load: ShardedLoad, result: Any) -> Any:
        """What a load returns, its model saving stock files."""
        model = load.model
        assert isinstance(model, PreTrainedModel)
        if load.shards:
            model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[method-assign]
        return result


class NeuronModelForCausalLM(NeuronModel):
    """Loads or builds causal language models."""

    auto_class = AutoModelForCausalLM


class NeuronModelForImageClassification(NeuronModel):
    """Loads or builds classifiers of images."""

    auto_class = AutoModelForImageClassification


class NeuronModelForImageTextToText(NeuronModel):
    """Loads or builds models that answer in text to images and text; `PatchReport` says which towers stay whole."""

    auto_class = AutoModelForImageTextToText


class NeuronModelForMaskedLM(NeuronModel):
    """Loads or builds masked language models."""

    auto_class = AutoModelForMaskedLM


class NeuronModelForSeq2SeqLM(NeuronModel):
    """Loads or builds sequence-to-sequence language models."""

    auto_class = AutoModelForSeq2SeqLM


class NeuronModelForSequenceClassification(NeuronModel):
    """Loads or builds classifiers of sequences."""

    auto_class = AutoModelForSequenceClassification


class NeuronModelForTokenClassification(NeuronModel):
    """Loads or builds classifiers of tokens."""

    auto_class = AutoModelForTokenClassification


class NeuronModelForQuestionAnswering(NeuronModel):
    """Loads or builds models that mark the answer to a question in a text."""

    auto_class = AutoModelForQuestionAnswering


def local_device() -> torch.device:
    """The NeuronCore of this process, or the CPU where that is the device."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.neuron.current_device())  # type: ignore[attr-defined]
