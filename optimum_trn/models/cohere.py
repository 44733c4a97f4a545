"""Cohere's Command R: Llama's modules with a parallel residual, and norms with weights of their own for every head."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import ModelPlan, register_plan

NORMED_ATTENTION = replace(ATTENTION, per_head={"self_attn.q_norm.weight": 0, "self_attn.k_norm.weight": 0})

register_plan(ModelPlan("cohere", attention=NORMED_ATTENTION, mlp=MLP))
register_plan(ModelPlan("cohere2", attention=ATTENTION, mlp=MLP))
