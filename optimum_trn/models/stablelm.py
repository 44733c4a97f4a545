"""StableLM: Llama's modules; its optional norms, one module for each head, are refused by name."""

from dataclasses import replace

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import ModelPlan, register_plan

HEADS = replace(ATTENTION, attributes=("num_heads", "num_key_value_heads"))

register_plan(ModelPlan("stablelm", attention=HEADS, mlp=MLP))
