"""The text tower of Llama 3.2 Vision, some of whose layers attend to the image instead of the text."""

from optimum_trn.models.llama import ATTENTION, MLP
from optimum_trn.patching import Attention, ModelPlan, OneOf, register_plan

HEADS = ("num_heads", "num_key_value_heads")
SELF = Attention(q=ATTENTION.q, k=ATTENTION.k, v=ATTENTION.v, o=ATTENTION.o, attributes=HEADS)
CROSS = Attention(
    q="cross_attn.q_proj",
    k="cross_attn.k_proj",
    v="cross_attn.v_proj",
    o="cross_attn.o_proj",
    per_head_norms=("cross_attn.q_norm", "cross_attn.k_norm"),
    attributes=HEADS,
    memory="cross_attention_states",
)

register_plan(ModelPlan("mllama_text_model", attention=OneOf(SELF, CROSS), mlp=MLP))
