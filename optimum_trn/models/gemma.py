"""Gemma, Gemma 2 and the text model of Gemma 3, which normalises queries and keys per head."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import ModelPlan, register_plan

NORMED_ATTENTION = replace(ATTENTION, per_head_norms=("self_attn.q_norm", "self_attn.k_norm"))

register_plan(ModelPlan("gemma", attention=ATTENTION, mlp=MLP))
register_plan(ModelPlan("gemma2", attention=ATTENTION, mlp=MLP))
register_plan(ModelPlan("gemma3_text", attention=NORMED_ATTENTION, mlp=MLP))
