"""Qwen2, with biases on q, k and v; Qwen3, which normalises q and k per head instead."""

from optimum_trn.patching import Attention, GatedMLP, ModelPlan, register_plan

PROJECTIONS = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj")
NORMS = ("self_attn.q_norm", "self_attn.k_norm")
MLP = GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")

register_plan(ModelPlan("qwen2", attention=Attention(**PROJECTIONS), mlp=MLP))
register_plan(ModelPlan("qwen3", attention=Attention(**PROJECTIONS, per_head_norms=NORMS), mlp=MLP))
