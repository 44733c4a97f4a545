"""Every configuration of transformers' auto mappings that can be built, tiny, with random inputs for it."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.image_text import IMAGE_TEXT, image_text_batch, image_text_class

ZOO: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "zoo.json").read_text())
"""By model type: what a tiny config has in place of the defaults, "*" for all kinds of classes or by kind."""

KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence": "SEQUENCE_CLASSIFICATION",
    "token": "TOKEN_CLASSIFICATION",
    "image": "IMAGE_CLASSIFICATION",
    "audio": "AUDIO_CLASSIFICATION",
    "question": "QUESTION_ANSWERING",
    "image_text": "IMAGE_TEXT_TO_TEXT",
}
"""The auto mappings, by what the labels of their classes are for."""

ROWS, LENGTH = 3, 14


def model_types(kind: str) -> list[str]:
    """The model types that transformers has in the mapping of a kind."""
    return list(getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES"))


def zoo_class(model_type: str, kind: str) -> type[PreTrainedModel]:
    """The class of a model type and kind."""
    found = getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING")[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, (tuple, list)) else found


def zoo_config(model_type: str, kind: str) -> PreTrainedConfig:
    """A tiny config without dropout; of a composite one, the part that the class takes."""
    entry = ZOO[model_type]
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(entry.get(kind, entry["*"])))
    takes = zoo_class(model_type, kind).config_class
    if takes is not type(config):
        for name in ("text_config", "decoder"):
            part = getattr(config, name, None)
            if takes is not None and isinstance(part, takes):
                config = part
                break
    for part in (config, config.get_text_config(), *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(part, PreTrainedConfig):
            part._experts_implementation = "eager"  # the grouped kernels refuse float64
            if kind == "sequence" and getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
    return config


def zoo_model(model_type: str, kind: str, seed: int = 0) -> PreTrainedModel:
    """The stock model, as its class initialises it."""
    if kind == "image_text":
        if model_type not in IMAGE_TEXT:
            raise NotImplementedError("there are no tiny sizes and inputs for it")
        return image_text_class(model_type, torch.float32, seed)
    torch.manual_seed(seed)
    return zoo_class(model_type, kind)(zoo_config(model_type, kind))


# (kind of values, arguments, shape): "B" rows, "S" tokens, a name a number of the config.
Values = tuple[Any, ...]
NORMAL, UNIFORM, INTEGERS, FILL = "normal", "uniform", "integers", "fill"
IDS: Values = (INTEGERS, 5, 95, "B", "S")
MASK: Values = (FILL, 1, "B", "S")
TEXT: dict[str, Values] = {"input_ids": IDS, "attention_mask": MASK}
LM: dict[str, Values] = {**TEXT, "labels": ("input_ids",)}
CLASS: dict[str, Values] = {"labels": (INTEGERS, 0, "num_labels", "B")}
BYTES: dict[str, Values] = {"inputs": (INTEGERS, 7, 262, "B", "S"), "attention_mask": MASK}
TEXT_WITH_AUDIO = (
    "audioflamingo3 glmasr moss_transcribe_diarize musicflamingo omniasr qwen3_asr voxtral granite_speech "
    "granite_speech_plus vibevoice_asr nemo_speechlm qwen2_audio"
)

INPUTS: dict[str, dict[str, Values]] = {
    "git causal": {**LM, "pixel_values": (NORMAL, "B", 3, 32, 32)},
    "fsmt": {
        **TEXT,
        "decoder_input_ids": (INTEGERS, 5, 95, "B", 9),
        "labels": (INTEGERS, 5, 95, "B", 9),
    },
    "siglip2": {
        "pixel_values": (NORMAL, "B", 16, 192),
        "pixel_attention_mask": (FILL, 1, "B", 16),
        "spatial_shapes": (FILL, 4, "B", 2),
        **CLASS,
    },
    "imagegpt": {"input_ids": (INTEGERS, 0, 100, "B", "S"), **CLASS},
    "pp_lcnet": {"pixel_values": (NORMAL, "B", 3, 64, 64)},
    "audio-spectrogram-transformer": {"input_values": (NORMAL, "B", 32, 16), **CLASS},
    "wav2vec2-bert": {"input_features": (NORMAL, "B", 20, 16), **CLASS},
    "whisper audio": {"input_features": (NORMAL, "B", 16, 40), **CLASS},
    "perceiver image": {"inputs": (NORMAL, "B", 3, "image_size", "image_size"), **CLASS},
    "perceiver masked": {
        "inputs": (INTEGERS, 7, 262, "B", "max_position_embeddings"),
        "attention_mask": (FILL, 1, "B", "max_position_embeddings"),
        "labels": ("inputs",),
    },
    "perceiver": {**BYTES, **CLASS},
    "lxmert": {
        **TEXT,
        "visual_feats": (NORMAL, "B", 5, "visual_feat_dim"),
        "visual_pos": (UNIFORM, "B", 5, 4),
        "labels": (INTEGERS, 0, "num_qa_labels", "B"),
    },
    "voxtral_realtime seq2seq": {**LM, "input_features": (NORMAL, "B", 128, 112)},
    **dict.fromkeys((f"{name} seq2seq" for name in TEXT_WITH_AUDIO.split()), LM),
}
"""What classes take that is not the usual, by "type kind" or by type."""

MORE: dict[str, dict[str, Values]] = {
    "bros": {"bbox": (UNIFORM, "B", "S", 8)},
    "tapas": {"token_type_ids": (FILL, 0, "B", "S", 7)},
}
"""What classes take beside the usual, by type."""

ENDS = "bart bigbird_pegasus mbart mt5 mvp plbart t5 umt5 led".split()
"""Encoder-decoders whose classifiers look for the end of a sequence."""


def zoo_inputs(model: PreTrainedModel, model_type: str, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs and labels, where the class takes labels."""
    if kind == "image_text":
        return image_text_batch(model)
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    usual = INPUTS.get(f"{model_type} {kind}") or INPUTS.get(model_type) or _usual(model, kind)
    made: dict[str, Tensor] = {}
    for name, values in {**usual, **MORE.get(model_type, {})}.items():
        made[name] = made[values[0]].clone() if values[0] in made else _values(values, config, generator)
    if model_type in ("layoutlm", "layoutlmv2", "layoutlmv3", "lilt"):
        corner = torch.randint(0, 400, (ROWS, LENGTH, 2), generator=generator)
        made["bbox"] = torch.cat([corner, corner + torch.randint(1, 100, corner.shape, generator=generator)], -1)
    if kind == "sequence" and model_type in ENDS:
        made["input_ids"][:, -1] = config.eos_token_id
    if model_type == "longformer" and kind == "question":
        made["input_ids"][:, 4:6] = made["input_ids"][:, -1:] = 2  # the separators of question and text
    if model_type in ("musicgen", "musicgen_melody"):
        books = config.num_codebooks
        made["input_ids"] = torch.randint(5, 95, (ROWS * books, LENGTH), generator=generator)
        made["labels"] = torch.randint(5, 95, (ROWS, LENGTH, books), generator=generator)
    if model_type == "shieldgemma2":
        ids = torch.randint(5, 95, (ROWS, 24), generator=generator)
        ids[:, 2:18] = 100
        made = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": (ids == 100).long(),
            "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        }
    return made


def _usual(model: PreTrainedModel, kind: str) -> dict[str, Values]:
    arguments = inspect.signature(model.forward).parameters
    config: Any = model.config
    if kind == "image":
        size = getattr(config, "image_size", None) or 32
        size = 32 if isinstance(size, dict) else size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {"pixel_values": (NORMAL, "B", getattr(config, "num_channels", None) or 3, height, width), **CLASS}
    if kind == "audio":
        return {"input_values": (NORMAL, "B", 4000), **CLASS}
    vocabulary = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", None) or 100
    given: dict[str, Values] = {"input_ids": (INTEGERS, 5, min(95, vocabulary - 5), "B", "S")}
    if "attention_mask" in arguments:
        given["attention_mask"] = MASK
    if kind in ("causal", "masked"):
        given["labels"] = ("input_ids",)
    elif kind == "seq2seq":
        given["labels"] = (INTEGERS, 5, min(95, vocabulary - 5), "B", 9)
    elif kind == "sequence":
        given |= CLASS
    elif kind == "token":
        given["labels"] = (INTEGERS, 0, "num_labels", "B", "S")
    else:
        given["start_positions"] = given["end_positions"] = (INTEGERS, 0, "S", "B")
    return given


def _values(values: Values, config: Any, generator: torch.Generator) -> Tensor:
    sizes = {"B": ROWS, "S": LENGTH}
    kind, *numbers = (sizes.get(v, getattr(config, v, v)) if isinstance(v, str) else v for v in values)
    if kind == NORMAL:
        return torch.randn(numbers, generator=generator)
    if kind == UNIFORM:
        return torch.rand(numbers, generator=generator)
    if kind == FILL:
        return torch.full(numbers[1:], numbers[0])
    return torch.randint(numbers[0], numbers[1], numbers[2:], generator=generator)
