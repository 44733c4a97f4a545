"""The towers of Qwen2-VL, 2.5 and 3: Qwen's layers for the text, and fused projections for the images."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION
from optimum_trn.models.llama import MLP as TEXT_MLP
from optimum_trn.models.qwen import NORMED_ATTENTION
from optimum_trn.patching import MLP, Experts, FusedAttention, GatedMLP, ModelPlan, OneOf, register_plan

for model_type in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"):
    register_plan(ModelPlan(model_type, attention=ATTENTION, mlp=TEXT_MLP))
register_plan(ModelPlan("qwen3_vl_text", attention=NORMED_ATTENTION, mlp=TEXT_MLP))
for model_type in ("qwen3_vl_moe_text", "qwen3_omni_moe_text"):
    register_plan(
        ModelPlan(model_type, attention=NORMED_ATTENTION, mlp=OneOf(Experts("mlp.experts"), TEXT_MLP)),
    )

VISION = ModelPlan(
    "qwen2_vl_vision",
    layers="blocks",
    embedding=(),
    attention=FusedAttention(
        qkv="attn.qkv", o="attn.proj", layout="blocked", attributes=("num_heads",), num_heads="num_heads"
    ),
    mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
)
GATED = GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")
LINEAR = MLP(up="mlp.linear_fc1", down="mlp.linear_fc2")

register_plan(VISION)
register_plan(replace(VISION, model_type="qwen2_5_vl_vision", mlp=GATED))
for model_type in ("qwen3_vl_vision", "qwen3_vl_moe_vision"):
    register_plan(replace(VISION, model_type=model_type, mlp=LINEAR))
