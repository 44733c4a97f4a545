"""The sizes of a transformer that decide what a training step needs, read off its Hugging Face config and its plan.

The registered plan of the model type says which numbers of the config are heads and widths, and which kind of
feed-forward part a layer has; no weight exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from optimum_trn.errors import UnsupportedModelError
from optimum_trn.patching import MLP, Attention, Experts, FusedAttention, get_plan
from optimum_trn.patching.blocks import LatentAttention, OneOf, Role, Where
from optimum_trn.patching.plan import ModelPlan

ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "albert", "modernbert", "deberta", "deberta-v2")
"""Model types that are pretrained with masked tokens; all others predict the next one."""

DECODERS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
"""Model types with one stack of causal layers, as in patching/plan.py."""

ROOT_MEAN_SQUARE = ("rms_norm_eps", "rms_norm_epsilon", "norm_eps")
"""Fields of configs whose norms are root mean square norms, without biases."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): the sizes of its low-rank projections.

    `query_rank` is 0 where queries have no low rank; `rotary` of a head's width is rotated, and comes from one key of
    all heads; values of a head are `value_width` wide.
    """

    query_rank: int
    key_value_rank: int
    rotary: int
    value_width: int


@dataclass(frozen=True)
class Architecture:
    """One stack of equal layers between an embedding and a head.

    `width` is the feed-forward part's, that of one expert where there are `experts`, `experts_per_token` of which work
    on a token. `masked` models have a masked-token head (a transformation before the output embeddings) and
    next-sentence classification. `biased` linear layers have biases.
    `attention_blocks` and `feed_forward_blocks` are those of one layer: a decoder's layer that reads an encoder's
    output has two attention blocks, and counts its share of the encoder's layers besides. The first `dense_layers` of a
    mixture of experts have one feed-forward part of `dense_width`, which only `parameters` tells apart. `patch_width`
    are the numbers that a token is made of where it is a patch of an image; `vocabulary` are the classes then.
    `tensor_limit` is the largest tensor_parallel_size that the plan takes, `decoder` models take sequence and context
    parallelism, and `cuttable` ones pipeline stages.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    width: int
    gated: bool
    vocabulary: int
    positions: int
    tied: bool
    root_mean_square: bool
    rotary: bool
    biased: bool
    dropout: bool
    attention_dropout: bool
    masked: bool
    experts: int = 0
    experts_per_token: int = 1
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    latent: Latent | None = None
    attention_blocks: float = 1.0
    feed_forward_blocks: float = 1.0
    patch_width: int = 0
    tensor_limit: int = 1
    decoder: bool = True
    cuttable: bool = True

    @property
    def value_width(self) -> int:
        """Of the values of one head."""
        return self.head_width if self.latent is None else self.latent.value_width

    def attention_weights_of(self, heads: int, kv_heads: int) -> int:
        """Entries of the matrices of one attention block, on a rank with so many heads."""
        if self.latent is None:
            return self.hidden * self.head_width * (2 * heads + 2 * kv_heads)
        latent, whole = self.latent, heads * self.head_width
        query = latent.query_rank * (self.hidden + whole) if latent.query_rank else self.hidden * whole
        down = self.hidden * (latent.key_value_rank + latent.rotary)
        up = latent.key_value_rank * heads * (self.head_width - latent.rotary + latent.value_width)
        return query + down + up + heads * latent.value_width * self.hidden

    @property
    def attention_weights(self) -> int:
        """Entries of the attention's matrices in one layer."""
        return round(self.attention_blocks * self.attention_weights_of(self.heads, self.kv_heads))

    @property
    def feed_forward_weights(self) -> int:
        """Entries of the feed-forward matrices in one layer, of all its experts."""
        matrices = 3 if self.gated else 2
        one = self.hidden * matrices * (self.width * max(1, self.experts) + self.shared_width)
        return round(self.feed_forward_blocks * one)

    @property
    def blocks(self) -> float:
        """Attention and feed-forward blocks of one layer; a decoder has two."""
        return self.attention_blocks + self.feed_forward_blocks

    @property
    def small_weights(self) -> int:
        """Entries of norms, biases and the router in one layer."""
        norms = self.blocks * self.hidden * (1 if self.root_mean_square else 2)
        biases = 0.0
        if self.biased:
            biases = self.attention_blocks * ((self.heads + 2 * self.kv_heads) * self.head_width + self.hidden)
            biases += self.feed_forward_blocks * (self.width + self.hidden)
        return round(norms + biases) + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.attention_weights + self.feed_forward_weights + self.small_weights

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embeddings, once where they are tied to the head; of patches, with their biases."""
        if self.patch_width:
            return self.hidden * (self.patch_width + 2 + self.positions + self.vocabulary) + self.vocabulary
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; what stands beside layers and embeddings counts where the objective needs it."""
        final_norm = 0 if self.masked else self.hidden * (1 if self.root_mean_square else 2)
        heads = 2 * self.hidden**2 + 8 * self.hidden + self.vocabulary if self.masked else 0
        matrices = 3 if self.gated else 2
        sparse = self.width * self.experts + self.shared_width
        dense = self.dense_layers * (matrices * self.hidden * (self.dense_width - sparse) - self.hidden * self.experts)
        return self.layers * self.layer_parameters + dense + self.embedding_parameters + final_norm + heads

    def model_flops(self, sequence_length: int) -> float:
        """FLOPs of one sequence, forward and backward without recomputation, as AWS counts them.

        aws-neuron-samples, `extract_mfu`: 12 L h s (6 h + s) for a layer of 12 h^2 weights, which is 6 for each weight
        and token and 12 h s for each token's attention; here with the weights that a layer has. Embeddings and heads
        are left out there, and so they are here.
        """
        width = self.width * self.experts_per_token + self.shared_width
        matrices = 3 if self.gated else 2
        active = self.attention_weights + self.feed_forward_blocks * self.hidden * matrices * width
        scores = self.attention_blocks * self.heads * (self.head_width + self.value_width)
        attention = 6 * scores * sequence_length
        return float(self.layers * sequence_length * (6 * active + attention))


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The architecture that a config describes.

    Raises `UnsupportedModelError` for model types without a plan, and for those that are not one stack of layers or an
    encoder and a decoder with one attention after the other, such as speech and multimodal models.
    """
    plan = get_plan(config.model_type)
    roles = list(_roles(plan)) if isinstance(plan, ModelPlan) else []
    kinds = (Attention, FusedAttention, LatentAttention)
    attention = next((role for role in roles if isinstance(role, kinds)), None)
    feed_forward = [role for role in roles if hasattr(role, "width")]
    stacks = plan.every_stack() if isinstance(plan, ModelPlan) else ()
    pair = len(stacks) == 2 and bool(getattr(config, "is_encoder_decoder", False))
    if not (len(stacks) == 1 or pair) or attention is None or not feed_forward or hasattr(config, "num_mel_bins"):
        raise UnsupportedModelError(
            f"The planner prices models that are one stack of layers, or an encoder and a decoder of text, which "
            f"{config.model_type!r} is not. trace_training_step measures its memory and FLOPs at a layout."
        )
    text: Any = stacks[0].config_of(config)
    vocabulary, patch = getattr(text, "vocab_size", None), _patch(text)
    if vocabulary is None and not patch:
        raise UnsupportedModelError(
            f"The planner prices models of tokens or of images cut into patches; {config.model_type!r} has neither a "
            "vocabulary nor a patch_size."
        )
    experts_role = next((role for role in feed_forward if isinstance(role, Experts)), None)
    role: Any = experts_role or _chosen(feed_forward, text)
    hidden = text.hidden_size
    heads = getattr(text, attention.num_heads)
    multi_query = isinstance(attention, FusedAttention) and getattr(text, "multi_query", False)
    kv_heads = 1 if multi_query else getattr(text, getattr(attention, "num_kv_heads", ""), None) or heads
    latent = _latent(text) if isinstance(attention, LatentAttention) else None
    kv_heads = heads if latent else kv_heads
    experts = (
        next((getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, None)), 0) if experts_role else 0
    )
    shared = (getattr(text, "n_shared_experts", 0) or 0) * getattr(text, role.width) if experts_role else 0
    positions = (text.image_size // text.patch_size) ** 2 + 1 if patch else _positions(text) * (2 if pair else 1)
    layers = getattr(text, "num_decoder_layers", None) or getattr(text, "decoder_layers", None) if pair else None
    share = text.num_hidden_layers / layers if layers else 0.0  # of an encoder's layers, in one of the decoder's
    dropout = ("hidden_dropout_prob", "resid_pdrop", "hidden_dropout", "resid_dropout", "dropout", "dropout_rate")
    of_scores = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout")
    return Architecture(
        model_type=config.model_type,
        layers=layers or text.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=text.qk_head_dim if latent else getattr(text, "head_dim", None) or _head_width(text, hidden, heads),
        width=getattr(text, role.width, None) or 4 * hidden,
        gated=not isinstance(role, MLP),
        vocabulary=int((config.num_labels if patch else vocabulary) or 0),
        positions=positions,
        tied=bool(getattr(text, "tie_word_embeddings", True)) and not patch,
        root_mean_square=_relative(text) or any(hasattr(text, name) for name in ROOT_MEAN_SQUARE),
        rotary=not positions and not _relative(text),
        biased=_biased(text),
        dropout=_rate(text, dropout) > 0,
        attention_dropout=_rate(text, (*of_scores, *(("dropout_rate",) if _relative(text) else ()))) > 0,
        masked=config.model_type in ENCODERS,
        experts=experts,
        experts_per_token=getattr(text, "num_experts_per_tok", 1) if experts else 1,
        shared_width=shared,
        dense_layers=min(getattr(text, "first_k_dense_replace", 0) or 0, text.num_hidden_layers) if experts else 0,
        dense_width=text.intermediate_size if experts else 0,
        latent=latent,
        attention_blocks=2 + share if pair else 1,
        feed_forward_blocks=1 + share,
        patch_width=patch,
        tensor_limit=min(plan.sizes(config).values()),
        decoder=config.model_type in DECODERS and not patch,
        cuttable=isinstance(plan, ModelPlan)
        and not plan.shares_layers
        and "*" not in stacks[0].layers
        and not (pair or patch),
    )


def _latent(config: Any) -> Latent:
    return Latent(config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim)


def _patch(config: Any) -> int:
    """Numbers in a patch of an image, 0 for models of tokens."""
    size = getattr(config, "patch_size", None)
    return size * size * config.num_channels if isinstance(size, int) and hasattr(config, "num_channels") else 0


def _chosen(roles: Sequence[Role], config: Any) -> Role:
    """Of a gated and a plain feed-forward part that a model type knows, the one that this config has."""
    plain = [role for role in roles if isinstance(role, MLP)]
    return plain[0] if plain and getattr(config, "is_gated_act", None) is False else roles[0]


def _relative(config: Any) -> bool:
    """Whether positions are learned biases of scores, as in T5, whose norms have no mean and no bias."""
    return hasattr(config, "relative_attention_num_buckets")


def _head_width(config: Any, hidden: int, heads: int) -> int:
    return getattr(config, "d_kv", None) or hidden // heads


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configs that say how many experts a layer has."""


def _roles(plan: ModelPlan) -> Iterator[Role]:
    """Every role of the plan that acts on its own input, whatever it is wrapped in."""
    pending = [role for stack in plan.every_stack() for role in stack.roles]
    while pending:
        role = pending.pop(0)
        if isinstance(role, OneOf):
            pending += role.roles
        elif isinstance(role, Where):
            if getattr(role.role, "memory", None) is None:  # cross-attention is for models with an encoder
                pending.append(role.role)
        else:
            yield role


def _rate(config: Any, names: tuple[str, ...]) -> float:
    return next((float(getattr(config, name)) for name in names if getattr(config, name, None) is not None), 0.0)


def _positions(config: Any) -> int:
    """Rows of a learned table of positions, which configs with rotary embeddings do not have."""
    if any(
        getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta", "rotary_pct", "alibi")
    ):
        return 0
    types = getattr(config, "type_vocab_size", 0) or 0
    return (getattr(config, "max_position_embeddings", 0) or 0) + types


def _biased(config: Any) -> bool:
    if _relative(config):
        return False
    if hasattr(config, "attention_bias"):
        return bool(config.attention_bias)
    return not any(hasattr(config, name) for name in ROOT_MEAN_SQUARE)
