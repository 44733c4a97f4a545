"""BERT and its relatives with its modules, which as decoders may attend to an encoder."""

from optimum_trn.patching import MLP, Attention, ModelPlan, Stack, Where, register_plan

ATTENTION = Attention(
    q="attention.self.query", k="attention.self.key", v="attention.self.value", o="attention.output.dense"
)
CROSS_ATTENTION = Attention(
    q="crossattention.self.query",
    k="crossattention.self.key",
    v="crossattention.self.value",
    o="crossattention.output.dense",
    memory="encoder_hidden_states",
)
FEED_FORWARD = MLP(up="intermediate.dense", down="output.dense")

for model_type in ("bert", "roberta", "xlm-roberta", "electra"):
    register_plan(
        ModelPlan(
            model_type,
            embedding="embeddings.word_embeddings",
            stacks=(Stack("encoder.layer", ATTENTION, Where(CROSS_ATTENTION), FEED_FORWARD),),
        )
    )
