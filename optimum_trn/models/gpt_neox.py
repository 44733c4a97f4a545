"""GPT-NeoX: a fused projection head by head, and a parallel residual."""

from optimum_trn.patching import MLP, FusedAttention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "gpt_neox",
        embedding="embed_in",
        attention=FusedAttention(qkv="attention.query_key_value", o="attention.dense"),
        mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    )
)
register_plan(
    ModelPlan(
        "persimmon",
        attention=FusedAttention(
            qkv="self_attn.query_key_value",
            o="self_attn.dense",
            per_head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
            attributes=("num_heads",),
        ),
        mlp=MLP(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    )
)
