"""Aria's text tower: Llama's attention, and a mixture of experts beside a shared one."""

from optimum_trn.models.llama import ATTENTION
from optimum_trn.patching import Experts, GatedMLP, ModelPlan, register_plan

SHARED = GatedMLP(
    gate="mlp.shared_experts.gate_proj",
    up="mlp.shared_experts.up_proj",
    down="mlp.shared_experts.down_proj",
    width="intermediate_size",
)

register_plan(
    ModelPlan("aria_text", attention=ATTENTION, mlp=Experts("mlp.experts", shared=SHARED, width="intermediate_size"))
)
