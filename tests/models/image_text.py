"""Every image-text model that can be built small, with random weights, and a batch with images for it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.models.tiny import randomise

ROWS, TEXT = 2, 8
"""Rows of a batch, and tokens of text in each."""

IMAGE_TEXT: dict[str, Any] = json.loads((Path(__file__).parent / "image_text.json").read_text())
"""By model type: what its config has in place of the defaults; inputs for two rows, as values or by shape; and how many
tokens stand for the image of a row."""

IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id")


def image_text_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small config without dropout."""
    config = CONFIG_MAPPING[model_type](**json.loads(json.dumps(IMAGE_TEXT[model_type]["config"])), **overrides)
    config._experts_implementation = "eager"  # the grouped kernels refuse float64
    return config


def image_text_class(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """The stock model with random weights, biases, norms and gates."""
    config = image_text_config(model_type)
    torch.manual_seed(seed)
    model: PreTrainedModel = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    randomise(model, seed)
    return model.eval()


def image_text_batch(model: PreTrainedModel, seed: int = 1) -> dict[str, Any]:
    """Two rows of text around an image, and labels that leave the image out; the second row has padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    entry = IMAGE_TEXT[config.model_type]
    arguments = inspect.signature(type(model).forward).parameters
    special = {value for name, value in config.to_dict().items() if name.endswith(("_id", "_index"))}
    vocabulary = min(getattr(config.get_text_config(decoder=True), "vocab_size", 128), 95)
    words = torch.tensor([token for token in range(5, vocabulary) if token not in special])
    count = entry.get("image_tokens", 0)
    tokens = words[torch.randint(0, len(words), (ROWS, TEXT + count), generator=generator)]
    image = torch.zeros_like(tokens, dtype=torch.bool)
    image[:, 3 : 3 + count] = True
    if count:
        token = next(getattr(config, name) for name in IMAGE_TOKENS if getattr(config, name, None) is not None)
        tokens[image] = token
    inputs: dict[str, Any] = {}
    if "input_ids" in arguments:
        inputs["input_ids"] = tokens
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, 0] = 0
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in arguments:
            inputs[name] = image.long()
    if "labels" in arguments:
        inputs["labels"] = tokens.masked_fill(image, -100)
    for name, value in entry.get("inputs", {}).items():
        if isinstance(value, dict):  # between 0 and 1, as pixels are
            value = torch.rand(value["shape"], generator=generator, dtype=torch.float64).to(model.dtype)
        inputs[name] = torch.as_tensor(value)
    return inputs


def configs_within(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configs that a composite config is made of, and those within them."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield part
            yield from configs_within(part)
