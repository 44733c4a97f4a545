"""GPT-2, with Conv1D projections, all queries before all keys and values; GPT-BigCode, mostly multi-query."""

from typing import Any

from optimum_trn.patching import MLP, FusedAttention, ModelPlan, Stack, Where, register_plan

ATTENTION = FusedAttention(qkv="attn.c_attn", o="attn.c_proj", layout="blocked", attributes=("num_heads", "split_size"))
CROSS_ATTENTION = FusedAttention(
    q="crossattention.q_attn",
    qkv="crossattention.c_attn",
    o="crossattention.c_proj",
    layout="blocked",
    attributes=("num_heads", "split_size"),
    memory="encoder_hidden_states",
)
FEED_FORWARD = MLP(up="mlp.c_fc", down="mlp.c_proj", width="n_inner")

register_plan(ModelPlan("gpt2", embedding="wte", stacks=(Stack("h", ATTENTION, Where(CROSS_ATTENTION), FEED_FORWARD),)))


def layout(config: Any) -> Any:
    """One key and value head after all queries, or queries, keys and values head by head."""
    return "multi_query" if config.multi_query else "grouped"


register_plan(
    ModelPlan(
        "gpt_bigcode",
        layers="h",
        embedding="wte",
        attention=FusedAttention(
            qkv="attn.c_attn",
            o="attn.c_proj",
            layout=layout,
            attributes=("num_heads", "embed_dim", "num_key_value_groups"),
        ),
        mlp=FEED_FORWARD,
    )
)
