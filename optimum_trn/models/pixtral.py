"""Pixtral's vision tower: Llama's layers without a vocabulary."""

from optimum_trn.patching import Attention, GatedMLP, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "pixtral",
        layers="transformer.layers",
        embedding=(),
        attention=Attention(
            q="attention.q_proj",
            k="attention.k_proj",
            v="attention.v_proj",
            o="attention.o_proj",
            attributes=("num_heads",),
        ),
        mlp=GatedMLP(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj"),
    )
)
