"""Llama, and Mistral, which differs only in its attention mask."""

from optimum_trn.patching import Attention, GatedMLP, ModelPlan, register_plan

ATTENTION = Attention(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj")
MLP = GatedMLP(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")

register_plan(ModelPlan("llama", attention=ATTENTION, mlp=MLP))
register_plan(ModelPlan("mistral", attention=ATTENTION, mlp=MLP))
