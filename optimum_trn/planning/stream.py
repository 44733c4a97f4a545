"""The operators that one rank runs for one micro-batch: matrix products and the fused elementwise chains between them.

How many instructions an elementwise operator needs of each element (`passes`) is its arithmetic on engines that do one
operation with an optional scale, bias or sum an instruction, as NeuronCores do; what a chain reads and writes is what
stands before and after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimum_trn.cost.operators import Chain, Matmul
from optimum_trn.planning.workload import Layout, Workload

Operator = Matmul | Chain

NORM = (4, 8)
"""Passes forward and backward: statistics, shift and scale, weight, bias."""
ROOT_MEAN_SQUARE_NORM = (2, 5)
SOFTMAX = (3, 2)
"""Scale and mask, maximum, exponential with its sum, division; backward a product, its sum, a difference, a product."""
DROPOUT = (3, 1)
"""A random number, its comparison with scale, and the product; backward the product."""
GELU = (1, 4)
GATED = (2, 5)
"""SiLU and a product, and what they pass back."""
ROTARY = (4, 4)
RESIDUAL = (1, 1)


@dataclass(frozen=True)
class Sizes:
    """What one rank has of a micro-batch and of a layer."""

    tokens: int
    sequences: float
    keys: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    shared_width: int
    expert_tokens: float
    experts: int
    residual_tokens: float
    itemsize: int

    @classmethod
    def of(cls, workload: Workload, layout: Layout) -> Sizes:
        """Those of a layout; heads and widths are filled up where the ranks do not divide them."""
        architecture, parallel = workload.architecture, layout.parallel
        tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
        queries = math.ceil(workload.sequence_length / context)
        tokens = layout.micro_batch * queries
        experts = max(1, architecture.experts * tensor // parallel.expert_parallel_size) if architecture.experts else 0
        own_width = math.ceil(architecture.width / tensor)
        if parallel.expert_parallel_size > 1:
            # Ranks hold whole experts then, for the tokens of all of them.
            own_width = architecture.width
            experts = max(1, architecture.experts // parallel.expert_parallel_size)
        return cls(
            tokens=tokens,
            sequences=layout.micro_batch,
            keys=workload.sequence_length,
            queries=queries,
            heads=math.ceil(architecture.heads / tensor),
            kv_heads=math.ceil(architecture.kv_heads / tensor),
            width=own_width,
            shared_width=math.ceil(architecture.shared_width / tensor),
            expert_tokens=tokens
            * architecture.experts_per_token
            / (tensor if parallel.expert_parallel_size > 1 else 1),
            experts=experts if parallel.expert_parallel_size > 1 else architecture.experts,
            residual_tokens=tokens / (tensor if parallel.sequence_parallel else 1),
            itemsize=workload.activation_bytes,
        )


def linear(m: float, k: float, n: float, itemsize: int, batch: float = 1) -> tuple[list[Operator], list[Operator]]:
    """A linear layer forward, and backward: the gradients of its input and of its weight."""
    forward = Matmul(m, k, n, itemsize, batch)
    return [forward], [Matmul(m, n, k, itemsize, batch), Matmul(k, m, n, itemsize, batch)]


def chain(
    elements: float, passes: tuple[float, float], itemsize: int, row: float, reads: float = 1, writes: float = 1
) -> tuple[list[Operator], list[Operator]]:
    """A chain forward, and backward, where it also reads what was kept of the forward pass."""
    forward = Chain(elements, passes[0], elements * itemsize * (reads + writes), row)
    backward = Chain(elements, passes[1], elements * itemsize * (reads + writes + 1), row)
    return [forward], [backward]


def attention_core(workload: Workload, sizes: Sizes) -> tuple[list[Operator], list[Operator]]:
    """Scores, softmax, dropout and their product with the values: what selective recomputation computes again."""
    architecture, item = workload.architecture, sizes.itemsize
    batch, width = sizes.sequences * sizes.heads, architecture.head_width
    scores = linear(sizes.queries, width, sizes.keys, item, batch)
    values = linear(sizes.queries, sizes.keys, architecture.value_width, item, batch)
    if workload.flash_attention:
        return _flash(scores, values, workload, sizes, batch)
    elements = batch * sizes.queries * sizes.keys
    passes = _add(SOFTMAX, DROPOUT) if architecture.attention_dropout else SOFTMAX
    # Rows of scores fit in SBUF: they go from one product through the softmax without HBM, and so do their gradients.
    kept = 2 if architecture.attention_dropout else 1
    products = [
        replace(operator, in_memory=True) for operator in (scores[0][0], values[1][0]) if isinstance(operator, Matmul)
    ]
    operands = Chain(0, 0, 2 * batch * (sizes.queries + sizes.keys) * width * item)
    softmax = Chain(elements, passes[0], elements * item * kept, sizes.keys)
    softmax_backward = Chain(elements, passes[1], elements * item * (kept + 1), sizes.keys)
    return (
        [products[0], operands, softmax, *values[0]],
        [products[1], operands, softmax_backward, *values[1][1:], *scores[1]],
    )


def _flash(
    scores: tuple[list[Operator], list[Operator]],
    values: tuple[list[Operator], list[Operator]],
    workload: Workload,
    sizes: Sizes,
    batch: float,
) -> tuple[list[Operator], list[Operator]]:
    """The same in tiles: half of the scores where they are causal, none in HBM, and once more in the backward pass.

    Dao et al. 2022 (arXiv:2205.14135).
    """
    share = 1.0 if workload.architecture.masked else 0.5
    elements = batch * sizes.queries * sizes.keys * share

    def tiled(operators: list[Operator]) -> list[Operator]:
        return [
            replace(operator, batch=operator.batch * share, in_memory=True)
            for operator in operators
            if isinstance(operator, Matmul)
        ]

    operands = Chain(0, 0, 4 * batch * sizes.queries * workload.architecture.head_width * sizes.itemsize)
    forward: list[Operator] = [*tiled(scores[0] + values[0]), Chain(elements, SOFTMAX[0], 0, sizes.keys), operands]
    backward: list[Operator] = [
        *tiled(scores[0] + values[1] + scores[1]),
        Chain(elements, SOFTMAX[0] + SOFTMAX[1], 0, sizes.keys),
        operands,
        operands,
    ]
    return forward, backward


def layer(workload: Workload, layout: Layout) -> tuple[list[Operator], list[Operator]]:
    """One layer forward and backward on one rank; the backward pass includes what `recompute` computes again."""
    architecture, sizes = workload.architecture, Sizes.of(workload, layout)
    item, hidden = sizes.itemsize, architecture.hidden
    queries, keys = sizes.heads * architecture.head_width, sizes.kv_heads * architecture.head_width
    residual = _add(RESIDUAL, DROPOUT) if architecture.dropout else RESIDUAL
    norm = ROOT_MEAN_SQUARE_NORM if architecture.root_mean_square else NORM
    # Residual, dropout and norm are one chain: two streams in, the residual and its norm out. Each block has one.
    between = chain(sizes.residual_tokens * hidden, _add(residual, norm), item, hidden, reads=2, writes=2)
    attention = [
        *_projections(workload, sizes),
        *(
            [chain(sizes.tokens * (queries + keys), ROTARY, item, architecture.head_width)]
            if architecture.rotary
            else []
        ),
        attention_core(workload, sizes),
        linear(sizes.tokens, sizes.heads * architecture.value_width, hidden, item),
        between,
    ]
    core = _times(attention_core(workload, sizes), architecture.attention_blocks)
    parts = [
        *(_times(part, architecture.attention_blocks) for part in attention),
        *(_times(part, architecture.feed_forward_blocks) for part in (*_feed_forward(workload, sizes, item), between)),
    ]
    forward = [operator for part in parts for operator in part[0]]
    backward = [operator for part in parts for operator in part[1]]
    recompute = layout.parallel.recompute
    if recompute == "selective":
        backward += core[0]
    elif recompute is not None:
        ratio = 1.0 if recompute == "full" else float(recompute)
        backward += [_part(operator, ratio) for operator in forward]
    return forward, backward


def _projections(workload: Workload, sizes: Sizes) -> list[tuple[list[Operator], list[Operator]]]:
    """From the hidden states to the queries, keys and values of this rank's heads."""
    architecture, item, hidden, tokens = (
        workload.architecture,
        sizes.itemsize,
        workload.architecture.hidden,
        sizes.tokens,
    )
    queries, keys = sizes.heads * architecture.head_width, sizes.kv_heads * architecture.head_width
    latent = architecture.latent
    if latent is None:
        return [linear(tokens, hidden, queries + 2 * keys, item)]
    up = sizes.heads * (architecture.head_width - latent.rotary + latent.value_width)
    norms = chain(tokens * (latent.query_rank + latent.key_value_rank), ROOT_MEAN_SQUARE_NORM, item, hidden)
    return [
        linear(tokens, hidden, (latent.query_rank or queries) + latent.key_value_rank + latent.rotary, item),
        norms,
        *([linear(tokens, latent.query_rank, queries, item)] if latent.query_rank else []),
        linear(tokens, latent.key_value_rank, up, item),
    ]


def _times(part: tuple[list[Operator], list[Operator]], count: float) -> tuple[list[Operator], list[Operator]]:
    """The part that many times."""
    if count == 1:
        return part
    return [_part(operator, count) for operator in part[0]], [_part(operator, count) for operator in part[1]]


def _feed_forward(workload: Workload, sizes: Sizes, item: int) -> Iterator[tuple[list[Operator], list[Operator]]]:
    architecture = workload.architecture
    hidden, gated = architecture.hidden, architecture.gated
    runs = [(float(sizes.tokens), 1, sizes.width)]
    if architecture.experts:
        yield linear(sizes.tokens, hidden, architecture.experts, item)
        experts = max(1, sizes.experts)
        runs = [(sizes.expert_tokens / experts, experts, sizes.width)]
        if sizes.shared_width:
            runs.append((float(sizes.tokens), 1, sizes.shared_width))
    for tokens, experts, width in runs:
        yield linear(tokens, hidden, width * (2 if gated else 1), item, experts)
        yield chain(tokens * experts * width, GATED if gated else GELU, item, width, reads=2 if gated else 1)
        yield linear(tokens, width, hidden, item, experts)


def head(workload: Workload, layout: Layout) -> tuple[list[Operator], list[Operator]]:
    """What follows the layers: the head over the vocabulary and the loss, on the last stage; of images, one token's."""
    architecture, sizes = workload.architecture, Sizes.of(workload, layout)
    vocabulary = math.ceil(architecture.vocabulary / layout.parallel.tensor_parallel_size)
    tokens = sizes.sequences if architecture.patch_width else sizes.tokens
    hidden, item = architecture.hidden, sizes.itemsize
    parts = [
        linear(tokens, hidden, vocabulary, item),
        chain(tokens * vocabulary, SOFTMAX, item, vocabulary),
    ]
    if architecture.masked:
        parts += [linear(tokens, hidden, hidden, item), chain(tokens * hidden, _add(GELU, NORM), item, hidden)]
    forward = [operator for part in parts for operator in part[0]]
    return forward, [operator for part in parts for operator in part[1]]


def embedding(workload: Workload, layout: Layout) -> tuple[list[Operator], list[Operator]]:
    """What precedes the layers, on the first stage: rows of tables are read, and their gradients added."""
    sizes = Sizes.of(workload, layout)
    hidden, patch = workload.architecture.hidden, workload.architecture.patch_width
    elements = sizes.residual_tokens * hidden
    if patch:  # no gradient goes back to the image
        (forward,), (_, of_weight) = linear(sizes.residual_tokens, patch, hidden, sizes.itemsize)
        return [forward], [of_weight]
    return chain(elements, _add(RESIDUAL, NORM), sizes.itemsize, workload.architecture.hidden)


def accumulation(workload: Workload, parameters: float) -> list[Operator]:
    """Once each micro-batch: its gradients are added to those of the step."""
    return [Chain(parameters, 1, parameters * (workload.weight_bytes + 2 * workload.gradient_bytes))]


def optimizer_step(workload: Workload, parameters: float) -> list[Operator]:
    """The optimizer on the parameters of this rank: reads weight, gradient and states, writes weight and states.

    The norm of the gradient reads it once more. LAMB (You et al. 2020, arXiv:1904.00962) keeps the update in memory
    until the norms of weight and update are known.
    """
    weight, gradient, states = workload.weight_bytes, workload.gradient_bytes, workload.state_bytes
    operators: list[Operator] = [
        Chain(parameters, 12, parameters * (2 * weight + gradient + 2 * states)),
        Chain(parameters, 2, parameters * gradient),
    ]
    if workload.optimizer == "lamb":
        operators.append(Chain(parameters, 6, parameters * 4 * gradient))
    return operators


def _add(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _part(operator: Operator, ratio: float) -> Operator:
    """The operator on that part of the layers, on average."""
    if isinstance(operator, Matmul):
        return replace(operator, batch=operator.batch * ratio)
    return replace(operator, elements=operator.elements * ratio, traffic=operator.traffic * ratio)
