"""EXAONE 4: Llama's modules with norms of queries and keys per head, and norms after the blocks."""

from optimum_trn.models.llama import MLP
from optimum_trn.models.qwen import NORMED_ATTENTION
from optimum_trn.patching import ModelPlan, register_plan

register_plan(ModelPlan("exaone4", attention=NORMED_ATTENTION, mlp=MLP))
