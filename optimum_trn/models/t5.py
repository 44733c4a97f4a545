"""T5 and mT5, with a table of relative biases for each head, which the first layer makes for all."""

from optimum_trn.patching import MLP, Attention, GatedMLP, ModelPlan, OneOf, Stack, register_plan


def attention(path: str, memory: str | None = None) -> Attention:
    """The attention at a path within a block."""
    return Attention(
        q=f"{path}.q",
        k=f"{path}.k",
        v=f"{path}.v",
        o=f"{path}.o",
        per_head={f"{path}.relative_attention_bias.weight": 1},
        attributes=("n_heads",),
        memory=memory,
        num_heads="num_heads",
    )


def feed_forward(path: str) -> OneOf:
    """The gated or plain feed-forward part at a path within a block."""
    gated = GatedMLP(gate=f"{path}.wi_0", up=f"{path}.wi_1", down=f"{path}.wo", width="d_ff")
    return OneOf(gated, MLP(up=f"{path}.wi", down=f"{path}.wo", width="d_ff"))


SELF = attention("layer.0.SelfAttention")
CROSS = attention("layer.1.EncDecAttention", memory="key_value_states")

for model_type in ("t5", "mt5"):
    register_plan(
        ModelPlan(
            model_type,
            embedding=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
            stacks=(
                Stack("encoder.block", SELF, feed_forward("layer.1.DenseReluDense")),
                Stack("decoder.block", SELF, CROSS, feed_forward("layer.2.DenseReluDense")),
            ),
        )
    )
