"""BART, mBART and Whisper: encoder-decoders with biases, whose feed-forward parts lie in the layer itself."""

from dataclasses import replace

from optimum_trn.patching import MLP, Attention, ModelPlan, Stack, Where, register_plan

ENCODER = Attention(
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.out_proj",
    attributes=("num_heads",),
    num_heads="encoder_attention_heads",
)
DECODER = replace(ENCODER, num_heads="decoder_attention_heads")
CROSS = Attention(
    q="encoder_attn.q_proj",
    k="encoder_attn.k_proj",
    v="encoder_attn.v_proj",
    o="encoder_attn.out_proj",
    attributes=("num_heads",),
    memory="key_value_states",
    num_heads="decoder_attention_heads",
)

for model_type in ("bart", "mbart", "whisper"):
    register_plan(
        ModelPlan(
            model_type,
            embedding=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
            stacks=(
                Stack("encoder.layers", ENCODER, MLP(up="fc1", down="fc2", width="encoder_ffn_dim")),
                Stack("decoder.layers", DECODER, Where(CROSS), MLP(up="fc1", down="fc2", width="decoder_ffn_dim")),
            ),
            beside_layers={f"{part}.layernorm_embedding": "before" for part in ("encoder", "decoder")},
        )
    )
