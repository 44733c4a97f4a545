"""Mixtral, and gpt-oss, whose attention has sinks and whose experts have biases: mixtures of experts."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION
from optimum_trn.patching import Experts, ModelPlan, register_plan

EXPERTS = Experts("mlp.experts", width="intermediate_size")
SINKS = replace(ATTENTION, per_head={"self_attn.sinks": 0})

register_plan(ModelPlan("mixtral", attention=ATTENTION, mlp=EXPERTS))
register_plan(ModelPlan("gpt_oss", attention=SINKS, mlp=EXPERTS))
