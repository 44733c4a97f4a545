"""Llama and the decoders with its modules: attention with separate projections, and a gated MLP."""

from optimum_trn.patching import Attention, GatedMLP, ModelPlan, register_plan

ATTENTION = Attention(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj")
MLP = GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")

for model_type in (
    "llama",
    "mistral",
    "granite",
    "olmo",
    "smollm3",
    "hyperclovax",
    "granite_docling_text",
    "paddleocr_vl_text",
):
    register_plan(ModelPlan(model_type, attention=ATTENTION, mlp=MLP))
