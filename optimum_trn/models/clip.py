"""CLIP: a text and a vision tower of the same layers, together or alone; the projections stay whole."""

from optimum_trn.patching import MLP, Attention, ModelPlan, Stack, register_plan

ATTENTION = Attention(
    q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.out_proj", attributes=("num_heads",)
)
FEED_FORWARD = MLP(up="mlp.fc1", down="mlp.fc2")

register_plan(
    ModelPlan(
        "clip",
        embedding=("text_model.embeddings.token_embedding",),
        stacks=(
            Stack("text_model.encoder.layers", ATTENTION, FEED_FORWARD, config="text_config"),
            Stack("vision_model.encoder.layers", ATTENTION, FEED_FORWARD, config="vision_config"),
        ),
    )
)
for model_type, embedding in (("clip_text_model", "embeddings.token_embedding"), ("clip_vision_model", ())):
    register_plan(
        ModelPlan(model_type, layers="encoder.layers", embedding=embedding, attention=ATTENTION, mlp=FEED_FORWARD)
    )
