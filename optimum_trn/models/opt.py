"""OPT: biases everywhere, and an MLP that lies in the layer itself."""

from optimum_trn.patching import MLP, Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "opt",
        layers="decoder.layers",
        embedding="decoder.embed_tokens",
        attention=Attention(
            q="self_attn.q_proj",
            k="self_attn.k_proj",
            v="self_attn.v_proj",
            o="self_attn.out_proj",
            attributes=("num_heads",),
        ),
        mlp=MLP(up="fc1", down="fc2", width="ffn_dim"),
        beside_layers={"decoder.project_out": "after", "decoder.final_layer_norm": "after"},
    )
)
