"""Phi, with a parallel residual and norms of queries and keys per head; Phi-3, with fused projections."""

from optimum_trn.patching import MLP, Attention, FusedAttention, FusedGatedMLP, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "phi",
        attention=Attention(
            q="self_attn.q_proj",
            k="self_attn.k_proj",
            v="self_attn.v_proj",
            o="self_attn.dense",
            per_head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        ),
        mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
    )
)
register_plan(
    ModelPlan(
        "phi3",
        attention=FusedAttention(
            qkv="self_attn.qkv_proj",
            o="self_attn.o_proj",
            layout="blocked",
            attributes=("num_key_value_heads",),
            config_attributes=("num_attention_heads",),
        ),
        mlp=FusedGatedMLP(gate_up="mlp.gate_up_proj", down="mlp.down_proj"),
    )
)
