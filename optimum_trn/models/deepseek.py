"""DeepSeek V3: multi-head latent attention, and a mixture of experts beside a shared one after dense layers."""

from optimum_trn.models.llama import MLP
from optimum_trn.patching import Experts, GatedMLP, LatentAttention, ModelPlan, OneOf, register_plan

SHARED = GatedMLP(
    gate="mlp.shared_experts.gate_proj",
    up="mlp.shared_experts.up_proj",
    down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
)

register_plan(
    ModelPlan(
        "deepseek_v3",
        attention=LatentAttention(
            down=(
                "self_attn.q_a_proj",
                "self_attn.q_a_layernorm",
                "self_attn.kv_a_proj_with_mqa",
                "self_attn.kv_a_layernorm",
            ),
            up=("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
            o="self_attn.o_proj",
        ),
        mlp=OneOf(Experts("mlp.experts", shared=SHARED), MLP),
    )
)
