"""DistilBERT."""

from optimum_trn.patching import MLP, Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "distilbert",
        layers="transformer.layer",
        embedding="embeddings.word_embeddings",
        attention=Attention(
            q="attention.q_lin", k="attention.k_lin", v="attention.v_lin", o="attention.out_lin", num_heads="n_heads"
        ),
        mlp=MLP(up="ffn.lin1", down="ffn.lin2", width="hidden_dim"),
    )
)
