"""BLOOM and Falcon: fused projections, ALiBi for each head, and for Falcon multi-query or grouped keys and values."""

from typing import Any

from optimum_trn.patching import MLP, FusedAttention, ModelPlan, register_plan


def falcon_layout(config: Any) -> Any:
    """Grouped in the new architecture, else head by head or with one key and value head after all queries."""
    return "multi_query" if config.multi_query and not config.new_decoder_architecture else "grouped"


register_plan(
    ModelPlan(
        "bloom",
        layers="h",
        embedding="word_embeddings",
        attention=FusedAttention(
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            attributes=("num_heads",),
            inputs={"alibi": 0},
        ),
        mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    )
)
register_plan(
    ModelPlan(
        "falcon",
        layers="h",
        embedding="word_embeddings",
        attention=FusedAttention(
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            layout=falcon_layout,
            attributes=("num_heads", "num_kv_heads"),
            inputs={"alibi": 1, "attention_mask": 1},
            num_kv_heads="num_kv_heads",
        ),
        mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", width="ffn_hidden_size"),
    )
)
