"""Qwen2, with biases on q, k and v; Qwen3, which normalises q and k per head instead."""

from dataclasses import replace

from optimum_trn.patching import Attention, GatedMLP, ModelPlan, register_plan

ATTENTION = Attention(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj")
NORMED_ATTENTION = replace(ATTENTION, per_head_norms=("self_attn.q_norm", "self_attn.k_norm"))
MLP = GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")

register_plan(ModelPlan("qwen2", attention=ATTENTION, mlp=MLP))
register_plan(ModelPlan("qwen3", attention=NORMED_ATTENTION, mlp=MLP))
