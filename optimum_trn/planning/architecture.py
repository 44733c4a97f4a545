"""The sizes of a transformer that decide what a training step needs, read off its Hugging Face config and its plan.

The registered plan of the model type says which numbers of the config are heads and widths, and which kind of
feed-forward part a layer has; no weight exists.
"""

from __future__ import annotations

from collections.abc import Iterator
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
class Architecture:
    """One stack of equal layers between an embedding and a head.

    `width` is the feed-forward part's, that of one expert where there are `experts`, `experts_per_token` of which work
    on a token. `masked` models have a masked-token head (a transformation before the output embeddings) and
    next-sentence classification. `biased` linear layers have biases.
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
    tensor_limit: int = 1
    decoder: bool = True
    cuttable: bool = True

    @property
    def attention_weights(self) -> int:
        """Entries of the attention's matrices in one layer."""
        return self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)

    @property
    def feed_forward_weights(self) -> int:
        """Entries of the feed-forward matrices in one layer, of all its experts."""
        matrices = 3 if self.gated else 2
        return self.hidden * matrices * (self.width * max(1, self.experts) + self.shared_width)

    @property
    def small_weights(self) -> int:
        """Entries of norms, biases and the router in one layer."""
        norms = 2 * self.hidden * (1 if self.root_mean_square else 2)
        biases = (self.heads + 2 * self.kv_heads) * self.head_width + self.width + 2 * self.hidden if self.biased else 0
        return norms + biases + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.attention_weights + self.feed_forward_weights + self.small_weights

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embeddings, once where they are tied to the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; what stands beside layers and embeddings counts where the objective needs it."""
        final_norm = 0 if self.masked else self.hidden * (1 if self.root_mean_square else 2)
        heads = 2 * self.hidden**2 + 8 * self.hidden + self.vocabulary if self.masked else 0
        return self.layers * self.layer_parameters + self.embedding_parameters + final_norm + heads

    def model_flops(self, sequence_length: int) -> float:
        """FLOPs of one sequence, forward and backward without recomputation, as AWS counts them.

        aws-neuron-samples, `extract_mfu`: 12 L h s (6 h + s) for a layer of 12 h^2 weights, which is 6 for each weight
        and token and 12 h s for each token's attention; here with the weights that a layer has. Embeddings and heads
        are left out there, and so they are here.
        """
        active = self.attention_weights + self.hidden * (3 if self.gated else 2) * (
            self.width * self.experts_per_token + self.shared_width
        )
        attention = 12 * self.heads * self.head_width * sequence_length
        return float(self.layers * sequence_length * (6 * active + attention))


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The architecture that a config describes.

    Raises `UnsupportedModelError` for model types without a plan, and for those that are not one stack of layers.
    """
    plan = get_plan(config.model_type)
    roles = list(_roles(plan)) if isinstance(plan, ModelPlan) else []
    attention = next((role for role in roles if isinstance(role, Attention | FusedAttention)), None)
    feed_forward = [role for role in roles if hasattr(role, "width")]
    stacks = plan.every_stack() if isinstance(plan, ModelPlan) else ()
    if len(stacks) != 1 or attention is None or not feed_forward or any(isinstance(r, LatentAttention) for r in roles):
        raise UnsupportedModelError(
            f"The planner prices models that are one stack of layers with multi-head or grouped-query attention, which "
            f"{config.model_type!r} is not. trace_training_step measures its memory and FLOPs at a layout."
        )
    text: Any = stacks[0].config_of(config)
    if getattr(text, "vocab_size", None) is None:
        raise UnsupportedModelError(f"The planner prices language models; {config.model_type!r} has no vocabulary.")
    experts_role = next((role for role in feed_forward if isinstance(role, Experts)), None)
    role: Any = experts_role or feed_forward[0]
    hidden = text.hidden_size
    heads = getattr(text, attention.num_heads)
    multi_query = isinstance(attention, FusedAttention) and getattr(text, "multi_query", False)
    kv_heads = 1 if multi_query else getattr(text, attention.num_kv_heads, None) or heads
    experts = (
        next((getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, None)), 0) if experts_role else 0
    )
    shared = (getattr(text, "n_shared_experts", 0) or 0) * getattr(text, role.width) if experts_role else 0
    positions = _positions(text)
    return Architecture(
        model_type=config.model_type,
        layers=text.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=getattr(text, "head_dim", None) or hidden // heads,
        width=getattr(text, role.width, None) or 4 * hidden,
        gated=not isinstance(role, MLP),
        vocabulary=text.vocab_size,
        positions=positions,
        tied=bool(getattr(text, "tie_word_embeddings", True)),
        root_mean_square=any(hasattr(text, name) for name in ROOT_MEAN_SQUARE),
        rotary=not positions,
        biased=_biased(text),
        dropout=_rate(text, ("hidden_dropout_prob", "resid_pdrop", "hidden_dropout", "resid_dropout", "dropout")) > 0,
        attention_dropout=_rate(
            text, ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout")
        )
        > 0,
        masked=config.model_type in ENCODERS,
        experts=experts,
        experts_per_token=getattr(text, "num_experts_per_tok", 1) if experts else 1,
        shared_width=shared,
        tensor_limit=min(plan.sizes(config).values()),
        decoder=config.model_type in DECODERS,
        cuttable=isinstance(plan, ModelPlan) and not plan.shares_layers and "*" not in stacks[0].layers,
    )


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
    if hasattr(config, "attention_bias"):
        return bool(config.attention_bias)
    return not any(hasattr(config, name) for name in ROOT_MEAN_SQUARE)
