"""SigLIP's vision tower and those with its layers, which are CLIP's; pooling heads and connectors stay whole."""

from optimum_trn.models.clip import ATTENTION, FEED_FORWARD
from optimum_trn.patching import ModelPlan, register_plan

for model_type in ("siglip_vision_model", "idefics2_vision", "idefics3_vision", "smolvlm_vision"):
    register_plan(ModelPlan(model_type, layers="encoder.layers", embedding=(), attention=ATTENTION, mlp=FEED_FORWARD))
