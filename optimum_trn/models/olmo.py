"""OLMo 2 and OLMoE, whose norms of queries and keys span all heads."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import Experts, ModelPlan, register_plan

NORMED_ATTENTION = replace(ATTENTION, whole_norms=("self_attn.q_norm", "self_attn.k_norm"))

register_plan(ModelPlan("olmo2", attention=NORMED_ATTENTION, mlp=MLP))
register_plan(ModelPlan("olmoe", attention=NORMED_ATTENTION, mlp=Experts("mlp.experts", width="intermediate_size")))
