"""Every class of a model type, tiny, with random weights, and a batch for it; the sizes are data."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from optimum_trn.patching import supported_models
from tests.models.image_text import image_text_batch, image_text_class
from tests.models.tiny import SIZES, randomise

DATA = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())
SIZES_OF = DATA["sizes"]  # by model type; a type that is not there gets the usual sizes under the usual names
VARIANTS = DATA["variants"]  # by model type and name: what its config can switch

KINDS = {  # what the labels of a class are for: the auto mapping that knows it
    "base": "MODEL_MAPPING",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
}


def kinds(model_type: str) -> list[str]:
    """The kinds of classes that transformers has for a model type."""
    config_class = CONFIG_MAPPING[model_type]
    return [
        kind for kind, mapping in KINDS.items() if getattr(modeling_auto, mapping).get(config_class, None) is not None
    ]


def families() -> list[str]:
    """The types with a plan that have classes of their own; the others are proven as towers of composite models."""
    return [name for name in supported_models() if name in SIZES_OF or set(kinds(name)) - {"base"}]


def tiny_config(model_type: str, kind: str, **overrides: Any) -> PreTrainedConfig:
    """Sizes from the data file, or the usual names' for a type that is not in it; no dropout."""
    config_class = CONFIG_MAPPING[model_type]
    stock = config_class()
    sizes = SIZES_OF.get(model_type) or {name: size for name, size in SIZES.items() if hasattr(stock, name)}
    config = config_class(**{**sizes, **overrides})
    config._experts_implementation = "eager"  # the grouped kernels refuse float64
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in vars(part).items():
            if ("drop" in name or name == "mask_time_prob") and isinstance(value, float):
                setattr(part, name, 0.0)
        if kind == "causal" and hasattr(part, "is_decoder"):
            part.is_decoder = True
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config


def tiny_class(
    model_type: str, kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A stock model of one kind of class with random weights, biases, norms and tables."""
    if kind == "image_text":
        return image_text_class(model_type, dtype, seed)
    config = tiny_config(model_type, kind, **overrides)
    model_class = getattr(modeling_auto, KINDS[kind])[type(config)]
    if isinstance(model_class, (tuple, list)):
        model_class = model_class[0]
    torch.manual_seed(seed)
    model = model_class(config).to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    randomise(model, seed)
    return model.eval()


def class_batch(model: PreTrainedModel, kind: str, rows: int = 3, length: int = 11, seed: int = 1) -> dict[str, Any]:
    """Random inputs, padded on both sides where the class takes a mask, and labels for its loss."""
    if kind == "image_text":
        return image_text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    arguments = inspect.signature(model.forward).parameters

    def integers(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype).requires_grad_()

    inputs: dict[str, Any] = {}
    text_config = config.get_text_config() if not hasattr(config, "vocab_size") else config
    if "pixel_values" in arguments:
        size = getattr(config, "image_size", None) or config.vision_config.image_size
        inputs["pixel_values"] = floats(rows, 3, size, size)
    if "input_features" in arguments:
        inputs["input_features"] = floats(rows, config.num_mel_bins, 2 * config.max_source_positions)
    if "input_ids" in arguments:
        inputs["input_ids"] = integers(text_config.vocab_size, rows, length, low=7)
        if "attention_mask" in arguments:
            mask = torch.ones_like(inputs["input_ids"])
            if config.is_encoder_decoder or not hasattr(config, "vision_config"):
                mask[1, :3], mask[2, -2:] = 0, 0
            inputs["attention_mask"] = mask
        if kind == "sequence" and config.is_encoder_decoder and config.eos_token_id is not None:
            inputs["input_ids"][:, -3] = config.eos_token_id
    if kind == "base" and "decoder_input_ids" in arguments:
        inputs["decoder_input_ids"] = integers(text_config.vocab_size, rows, 6, low=7)
    if kind == "causal" and any("encoder_attn" in name or "crossatt" in name for name, _ in model.named_modules()):
        states = floats(rows, 5, config.hidden_size)
        if "encoder_hidden_states" in arguments:
            inputs["encoder_hidden_states"] = states
        else:
            inputs["encoder_outputs"] = (states,)
    if kind in ("causal", "masked"):
        inputs["labels"] = inputs["input_ids"].masked_fill(torch.rand(rows, length, generator=generator) < 0.2, -100)
    elif kind in ("seq2seq", "speech"):
        inputs["decoder_input_ids"] = integers(config.vocab_size, rows, 7, low=7)
        inputs["labels"] = inputs["decoder_input_ids"].roll(-1, dims=1)
        inputs["labels"][0, -2:] = -100
    elif kind in ("sequence", "image", "audio"):
        inputs["labels"] = integers(config.num_labels, rows)
    elif kind == "token":
        inputs["labels"] = integers(config.num_labels, rows, length)
    elif kind == "question":
        inputs["start_positions"], inputs["end_positions"] = integers(length, rows), integers(length, rows)
    return inputs
