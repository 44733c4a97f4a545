"""The closed form of the peak memory of a training step, from sizes and degrees alone: nothing here is measured.

States in float32 take 4 bytes for each parameter of a core, 8 for the two moments of AdamW (Kingma and Ba 2015,
arXiv:1412.6980) and, from the backward pass to the optimizer, 4 for the gradient; ZeRO-1 (Rajbhandari et al. 2020,
arXiv:1910.02054) divides the moments, MiCS (Zhang et al. 2022, arXiv:2205.00119) all of them.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, sections 4.1 and 4.2), whose tables count GPT's block in
bfloat16 with dropout; counted the same way for Llama's block in float32 without dropout, with t tokens, hidden size h,
feed-forward size f, a heads, sequences of s tokens and tensor parallel p, a layer keeps, in elements,

    norms             6 t h          the input, the normalised input and the output of both
    attention         4 t h / p      queries, keys, values, and what the output projection reads
    attention core    a s t / p      the softmax; the scores before it are not kept
    feed-forward      4 t f / p      gate, its activation, up, and their product

Sequence parallelism divides the norms by p as well: of their outputs, which the blocks read gathered, a rank keeps its
run, and gathers again in the backward pass. Selective recomputation drops the attention core. The loss takes
t x vocabulary buffers: of the whole vocabulary three at once in the backward pass of the stock loss (log-softmax, its
gradient, that of the logits). Of a cut one there are the logits of a chunk of tokens only, as many as loss.py says,
which become their own gradient in place, beside the gradients of the head's weight and of its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BYTES = 4  # of a float32
CHUNK_TOKENS, CHUNK_BYTES = 256, 16 * 2**20  # of logits that exist at a time: optimum_trn/parallel/loss.py


@dataclass(frozen=True)
class Sizes:
    """Of a Llama without grouped queries, and of the batch of one data-parallel rank."""

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SIZES = {
    "32k": Sizes(vocabulary=32_000, hidden=256, feed_forward=688, layers=4, heads=8, rows=2, length=512),
    "tiny": Sizes(vocabulary=4_096, hidden=64, feed_forward=172, layers=4, heads=4, rows=2, length=128),
}


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism; a pipeline works on one row at a time, in as many micro-batches as it has stages."""

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    selective: bool = False
    stages: int = 1
    partition: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.stages

    @property
    def arguments(self) -> dict[str, Any]:
        """As NeuronTrainingArguments takes them."""
        return dict(
            tensor_parallel_size=self.tensor,
            sequence_parallel=self.sequence,
            pipeline_parallel_size=self.stages,
            recompute="selective" if self.selective else None,
            mics_partition_size=self.partition if self.partition > 1 else None,
        )


@dataclass(frozen=True)
class Peak:
    """Bytes at the fullest moment of a core's step, by what they are for."""

    parameters: float
    moments: float
    gradients: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.parameters + self.moments + self.gradients + self.activations + self.logits


def parameters_of(sizes: Sizes, layers: int, tables: int, tensor: int) -> int:
    """Parameters of a core: so many layers, and of embedding and head `tables`; norms are whole everywhere."""
    block = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.feed_forward
    norms = (2 * layers + (tables > 0)) * sizes.hidden
    return (layers * block + tables * sizes.vocabulary * sizes.hidden) // tensor + norms


def activations_of(sizes: Sizes, layout: Layout, layers: int, tokens: int) -> float:
    """Bytes that the forward pass of `layers` keeps of so many tokens."""
    wide, p = tokens * sizes.hidden, layout.tensor
    norms = 6 * wide / (p if layout.sequence else 1)
    core = 0 if layout.selective else sizes.heads * sizes.length * tokens
    return layers * BYTES * (norms + (4 * wide + core + 4 * tokens * sizes.feed_forward) / p)


def logits_of(sizes: Sizes, layout: Layout, tokens: int) -> float:
    """Bytes of the loss at its fullest."""
    if layout.tensor == 1:
        return 3 * BYTES * tokens * sizes.vocabulary
    own = sizes.vocabulary // layout.tensor
    chunk = min(tokens, max(CHUNK_TOKENS, CHUNK_BYTES // (own * BYTES)))
    return BYTES * (chunk * own + (own + tokens) * sizes.hidden)


def closed_form(sizes: Sizes, layout: Layout) -> list[Peak]:
    """The peak of each core of one copy of the model; equal cores are given once.

    It is where the loss is, when all activations are there and no gradient yet.
    """
    if layout.stages > 1:
        return _pipeline(sizes, layout)
    own = BYTES * parameters_of(sizes, sizes.layers, 2, layout.tensor)
    # Gathered while the loss is computed with them: what is in no layer, embedding, head and last norm.
    gathered = BYTES * parameters_of(sizes, 0, 2, 1) if layout.partition > 1 else 0
    zero = layout.data // layout.partition
    return [
        Peak(
            parameters=own / layout.partition + gathered,
            moments=2 * own / layout.partition / zero,
            gradients=0,
            activations=activations_of(sizes, layout, sizes.layers, sizes.tokens),
            logits=logits_of(sizes, layout, sizes.tokens),
        )
    ]


def _pipeline(sizes: Sizes, layout: Layout) -> list[Peak]:
    """Two stages in 1F1B; the head outweighs these layers, so that the second stage has one of them."""
    assert layout.stages == 2
    half = sizes.tokens // 2
    first = BYTES * parameters_of(sizes, sizes.layers - 1, 1, 1) - BYTES * sizes.hidden  # no last norm
    last = BYTES * parameters_of(sizes, 1, 1, 1)
    kept = activations_of(sizes, layout, sizes.layers - 1, half)
    table = BYTES * sizes.vocabulary * sizes.hidden
    # The first stage: before the first backward pass both micro-batches are kept; at the end of the second the
    # gradients are there, and that of the embedding once more, before it is added.
    at_first = max(
        (Peak(first, 2 * first, 0, 2 * kept, 0), Peak(first, 2 * first, first + table, 0, 0)),
        key=lambda peak: peak.total,
    )
    # The last: the loss of the second micro-batch, beside the gradients of the first.
    at_last = Peak(last, 2 * last, last, activations_of(sizes, layout, 1, half), logits_of(sizes, layout, half))
    return [at_first, at_last]
