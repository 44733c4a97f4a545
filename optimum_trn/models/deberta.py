"""DeBERTa v2 and v3, whose attention also projects embeddings of relative positions into heads."""

from optimum_trn.models.bert import FEED_FORWARD
from optimum_trn.patching import Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "deberta-v2",
        layers="encoder.layer",
        embedding="embeddings.word_embeddings",
        attention=Attention(
            q="attention.self.query_proj",
            k="attention.self.key_proj",
            v="attention.self.value_proj",
            o="attention.output.dense",
            more=("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
            memory="rel_embeddings",
            attributes=("num_attention_heads",),
        ),
        mlp=FEED_FORWARD,
        shares_layers=True,  # the embeddings of relative positions
    )
)
