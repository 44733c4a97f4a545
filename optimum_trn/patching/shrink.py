"""Shrinks the config of a model to a tiny one of the same architecture, by the usual names of its numbers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 128
HIDDEN, HEADS, HEAD_WIDTH, WIDTH = 64, 4, 16, 112
LENGTH, ROWS = 14, 3

KEPT = re.compile(
    r"^(id2label|label2id|num_labels|transformers_version|model_type|type_vocab_size|architectures|dtype)$"
)
TOKEN = re.compile(r"(token_id|token_index|token_idx|_index|_id|_ids)$")
PER_LAYER = re.compile(r"(layer_types|layers_block_type|_types|no_rope_layers|attention_layers|attn_layers|per_layer)$")
LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|[lxr]_layers|num_blocks|depth|"
    r"(encoder|decoder)_num_hidden_layers|num_self_attends_per_block|num_decoder_layers|num_encoder_layers)$"
)

NUMBERS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"vocab_size(_per_layer_input)?$", VOCABULARY),
        (r"^(mamba_n_heads|mamba_num_heads)$", 8),
        (r"^(linear_num_key_heads|index_n_heads)$", 2),
        (r"(attention_heads|n_heads?|num_heads|encoder_heads|linear_num_value_heads)$", HEADS),
        (r"^qk_head_dim$", 2 * HEAD_WIDTH),
        (r"(head_dim|d_kv|kv_channels|attention_head_size|dim_head|d_head|mamba_headdim|mamba_d_head)$", HEAD_WIDTH),
        (
            r"(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|dim_ff|ffn_hidden_size|mlp_dim|mlp_hidden_size)(_mlp)?$",
            WIDTH,
        ),
        (r"^(hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_dim|word_embed_proj_dim|hidden_dim)$", HIDDEN),
        (
            r"^(projection_dim|encoder_hidden_size|decoder_hidden_size|out_hidden_size|lru_width|pooler_output_size)$",
            HIDDEN,
        ),
        (r"^(pooler_hidden_size|attention_hidden_size|true_hidden_size|embedding_size)$", HIDDEN),
        (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$", 4),
        (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|top_k_experts|num_selected_experts)$", 2),
        (r"^(n_group|topk_group|num_expert_groups?)$", 1),
        (r"^(n_shared_experts|num_shared_experts|first_k_dense_replace|num_dense_layers)$", 1),
        (r"^(kv_lora_rank|o_lora_rank)$", 32),
        (r"^q_lora_rank$", 24),
        (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions)$", 128),
        (r"^original_max_position_embeddings$", 64),
        (r"^(sliding_window|attention_window_size|local_attention|attention_chunk_size)$", 8),
        (r"^(mamba_d_ssm)$", 128),
        (r"^(state_size|mamba_d_state|ssm_state_size|time_step_rank|mamba_dt_rank)$", 8),
        (r"^(chunk_size|mamba_chunk_size|index_topk)$", 4),
        (r"^(n_groups|mamba_n_groups)$", 2),
        (r"^(hidden_size_per_layer_input|laurel_rank)$", 16),
        (r"^num_kv_shared_layers$", 0),
        (r"^image_size$", 32),
        (r"^patch_size$", 8),
        (r"^num_mel_bins$", 16),
    )
)
KEYS = re.compile(r"(key_value_heads|num_kv_heads|n_kv_heads|num_query_groups|kv_n_heads)$")


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """A tiny config of the same class, with the same switches; `ValueError` or whatever its class raises if it cannot.

    No number grows, dropout is off, and of layers of several types there is one of each.
    """
    tiny = type(config).from_dict(_shrunk(config.to_dict()))
    for part in (tiny, *(getattr(tiny, name, None) for name in tiny.sub_configs)):
        if isinstance(part, PreTrainedConfig):
            part._experts_implementation = "eager"  # the grouped kernels refuse float64
            if getattr(part, "use_cache", None):
                part.use_cache = False
    return tiny


def _shrunk(sizes: dict[str, Any]) -> dict[str, Any]:
    layered = {name: value for name, value in sizes.items() if PER_LAYER.search(name) and isinstance(value, list)}
    kinds = list(dict.fromkeys(zip(*layered.values(), strict=False))) if layered else []
    layers = max(2, min(len(kinds), 4))
    chosen = (kinds + kinds[-1:] * layers)[:layers]
    result = {name: _number(name, value, sizes, layers) for name, value in sizes.items()}
    for place, name in enumerate(layered):
        if chosen and layered[name]:
            result[name] = [kind[place] for kind in chosen]
    return result


def _number(name: str, value: Any, sizes: dict[str, Any], layers: int) -> Any:
    if KEPT.search(name) or value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return _shrunk(value) if "model_type" in value or name.endswith("_config") else value
    if isinstance(value, float):
        return 0.0 if re.search(r"drop|mask_time_prob|mask_feature_prob", name) and 0 < value < 1 else value
    if isinstance(value, list):
        return [0.0] * len(value) if "drop" in name and all(isinstance(item, float) for item in value) else value
    if not isinstance(value, int):
        return value
    if TOKEN.search(name) and not name.endswith("vocab_size"):
        return value if value < VOCABULARY else VOCABULARY - 1 - len(name) % 8
    if KEYS.search(name):
        heads = next((sizes[key] for key in ("num_attention_heads", "n_heads", "n_head") if sizes.get(key)), 0)
        return HEADS if value == heads else min(value, 2)
    if LAYERS.search(name):
        return min(value, layers)
    return next((min(value, number) for pattern, number in NUMBERS if pattern.search(name)), value)


def inputs_for(model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    """Random inputs for any class, by the names of its forward's arguments; outputs stand in for a loss."""
    generator = torch.Generator().manual_seed(seed)
    names = inspect.signature(model.forward).parameters
    config: Any = model.config
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or VOCABULARY

    def tokens(length: int) -> Tensor:
        return torch.randint(5, max(6, min(vocabulary, 96) - 5), (ROWS, length), generator=generator)

    main = model.main_input_name
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        shape = (ROWS, getattr(config, "num_channels", None) or 3, height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    if main == "input_values":
        return {"input_values": torch.randn(ROWS, 4000, generator=generator)}
    if main == "input_features":
        length = 2 * (getattr(config, "max_source_positions", None) or 50)
        inputs: dict[str, Any] = {
            "input_features": torch.randn(ROWS, getattr(config, "num_mel_bins", 16), length, generator=generator)
        }
    else:
        inputs = {"input_ids": tokens(LENGTH)}
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens(9)
    if "labels" in names and model.get_output_embeddings() is not None:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return {name: value for name, value in inputs.items() if value is not None}
