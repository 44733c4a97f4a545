"""GPT-Neo, with global and local attention in turn, and GPT-J, with a parallel residual: separate projections."""

from optimum_trn.patching import MLP, Attention, ModelPlan, register_plan

register_plan(
    ModelPlan(
        "gpt_neo",
        layers="h",
        embedding="wte",
        attention=Attention(
            q="attn.attention.q_proj",
            k="attn.attention.k_proj",
            v="attn.attention.v_proj",
            o="attn.attention.out_proj",
            attributes=("num_heads",),
        ),
        mlp=MLP(up="mlp.c_fc", down="mlp.c_proj"),
    )
)
register_plan(
    ModelPlan(
        "gptj",
        layers="h",
        embedding="wte",
        attention=Attention(q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", o="attn.out_proj"),
        mlp=MLP(up="mlp.fc_in", down="mlp.fc_out", width="n_inner"),
    )
)
