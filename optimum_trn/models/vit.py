"""ViT; patch embeddings, pooler and classifier stay whole."""

from optimum_trn.patching import MLP, Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "vit",
        embedding=(),
        attention=Attention(q="attention.q_proj", k="attention.k_proj", v="attention.v_proj", o="attention.o_proj"),
        mlp=MLP(up="mlp.fc1", down="mlp.fc2"),
    )
)
