"""The text towers of GLM-4V, GLM-OCR and their mixture of experts."""

from optimum_trn.models.deepseek import SHARED
from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import Experts, FusedGatedMLP, ModelPlan, OneOf, register_plan

FUSED = FusedGatedMLP(gate_up="mlp.gate_up_proj", down="mlp.down_proj")

for model_type in ("glm4v_text", "glm_ocr_text"):
    register_plan(ModelPlan(model_type, attention=ATTENTION, mlp=FUSED))
register_plan(ModelPlan("glm4v_moe_text", attention=ATTENTION, mlp=OneOf(Experts("mlp.experts", shared=SHARED), MLP)))
