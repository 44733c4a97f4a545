"""ALBERT, whose layers share their weights in groups, and whose attention adds its own residual."""

from optimum_trn.patching import MLP, Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "albert",
        layers="encoder.albert_layer_groups.*.albert_layers",
        embedding="embeddings.word_embeddings",
        attention=Attention(
            q="attention.query",
            k="attention.key",
            v="attention.value",
            o="attention.dense",
            after=("attention.LayerNorm",),
        ),
        mlp=MLP(up="ffn", down="ffn_output"),
    )
)
