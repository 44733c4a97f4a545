"""Qwen2, with biases on q, k and v; Qwen3, which normalises q and k per head instead, and its mixture of experts."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import Experts, ModelPlan, OneOf, register_plan

NORMED_ATTENTION = replace(ATTENTION, per_head_norms=("self_attn.q_norm", "self_attn.k_norm"))

register_plan(ModelPlan("qwen2", attention=ATTENTION, mlp=MLP))
register_plan(ModelPlan("qwen3", attention=NORMED_ATTENTION, mlp=MLP))
register_plan(ModelPlan("qwen3_moe", attention=NORMED_ATTENTION, mlp=OneOf(Experts("mlp.experts"), MLP)))
