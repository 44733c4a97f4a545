"""Plans for model types that have no declaration: recognised, proven on a tiny copy of the architecture, and cached."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from optimum_trn.device.build import cache_directory
from optimum_trn.errors import UnsupportedModelError
from optimum_trn.patching.declaration import from_json, to_json
from optimum_trn.patching.plan import ModelPlan
from optimum_trn.patching.proof import Subject
from optimum_trn.patching.search import Search
from optimum_trn.patching.shrink import inputs_for, shrunk

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
VOLATILE = re.compile(r"^(id2label|label2id|dtype|torch_dtype|_\w+|architectures|transformers_version|problem_type)$")

_proven: dict[str, ModelPlan] = {}
_by_type: dict[str, ModelPlan] = {}


def infer_plan(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    model_class: type[PreTrainedModel] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> ModelPlan:
    """A proven plan for a model, or for the class that a config is for (its language model, unless `model_class`).

    Works on a tiny copy with random weights, on the CPU and over simulated ranks, so that it needs neither the weights
    nor other processes, and gives the same plan in all of them.  The plan is kept, in this process and on disk; it says
    which parts are `unproven`.  For a class whose forward takes more than tokens, an image or sound, give `inputs`,
    with which the model itself is run, which has to be tiny then and gets random weights.  `print(declaration(plan))`
    shows the plan as a declaration to commit under models/.

    Raises `UnsupportedModelError`, with what did not match, for a model of which nothing can be proven.
    """
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    stock = _stock_class(model_class or (type(model_or_config) if config is not model_or_config else None), config)
    key = _key(stock, config)
    if key not in _proven:
        path = cache_directory() / "plans" / f"{key}.json"
        if path.exists():
            _proven[key] = from_json(path.read_text())
        else:
            model = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
            _proven[key] = _search(stock, config, model if inputs is not None else None, inputs)
            _write(path, to_json(_proven[key]))
    _by_type[config.model_type] = _proven[key]
    return _proven[key]


def _search(
    stock: type[PreTrainedModel],
    config: PreTrainedConfig,
    model: PreTrainedModel | None,
    inputs: Mapping[str, Any] | None,
) -> ModelPlan:
    """The search, undisturbed by the modes of torch that are on where a model is patched, such as the meta device."""
    dtype, generator = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float32)
    try:
        with ThreadPoolExecutor(max_workers=1) as thread:  # modes belong to their thread
            return thread.submit(_search_alone, stock, config, model, inputs).result()
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(generator)


def _search_alone(
    stock: type[PreTrainedModel],
    config: PreTrainedConfig,
    model: PreTrainedModel | None,
    inputs: Mapping[str, Any] | None,
) -> ModelPlan:
    try:
        torch.manual_seed(0)
        model = model or stock(shrunk(config))
        subject = Subject(model, inputs or inputs_for(model))
    except Exception as error:
        raise UnsupportedModelError(
            f"No plan for model type {config.model_type!r}, and a tiny copy of {stock.__name__} to infer one with "
            f"could not be built and run: {type(error).__name__}: {error} Use tensor_parallel_size=1, or declare the "
            "family with register_plan."
        ) from error
    try:
        return Search(subject, known=_by_type.get(config.model_type)).run()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error} Use tensor_parallel_size=1, or declare the family with register_plan."
        ) from None


def _stock_class(given: type[Any] | None, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that is given, or that the config names, or that its language model has."""
    if given is not None:
        return next(cls for cls in given.__mro__ if not cls.__module__.startswith("optimum_trn"))
    for name in config.architectures or ():
        if hasattr(transformers, name):
            found: type[PreTrainedModel] = getattr(transformers, name)
            return found
    for mapping in MAPPINGS:
        try:
            found = getattr(modeling_auto, mapping)[type(config)]
        except (KeyError, ValueError):  # not in the mapping, or there under a name that transformers does not export
            continue
        return found[0] if isinstance(found, (tuple, list)) else found
    raise UnsupportedModelError(f"transformers has no model class for configs of type {config.model_type!r}.")


def _key(stock: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """What a proof is good for: the class, the structure that the config gives it, and the code that proved it."""
    try:
        structure = _structure(shrunk(config).to_dict())
    except Exception:
        structure = _structure(config.to_dict())
    text = json.dumps([stock.__module__, stock.__qualname__, structure, _versions()], sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _structure(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _structure(item) for name, item in value.items() if not VOLATILE.match(str(name))}
    return value


@cache
def _versions() -> list[str]:
    """A plan proven by other code, or for other code, is not proven."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for part in ("parallel", "patching"):
        for file in sorted((package / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return [torch.__version__, transformers.__version__, digest.hexdigest()]


def _write(path: Path, text: str) -> None:
    """Whole or not at all, since other ranks may write the same; a cache that cannot be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass
