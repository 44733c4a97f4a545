"""StarCoder2: Llama's attention with biases and a plain MLP."""

from optimum_trn.models.llama import ATTENTION
from optimum_trn.patching import MLP, ModelPlan, register_plan

register_plan(ModelPlan("starcoder2", attention=ATTENTION, mlp=MLP(up="mlp.c_fc", down="mlp.c_proj")))
