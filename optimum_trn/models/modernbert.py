"""ModernBERT: fused projections of queries, keys and values, and of gate and up."""

from optimum_trn.patching import FusedAttention, FusedGatedMLP, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "modernbert",
        embedding="embeddings.tok_embeddings",
        attention=FusedAttention(qkv="attn.Wqkv", o="attn.Wo", layout="blocked"),
        mlp=FusedGatedMLP(gate_up="mlp.Wi", down="mlp.Wo"),
    )
)
