"""Attention roles: separate, fused and low-rank projections, cut by heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.pytorch_utils import Conv1D

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block, HeadLayout, Heads
from optimum_trn.patching.blocks.role import column_wise, enter, leave, parent, present, require_known, size_of
from optimum_trn.patching.head_styles import PerHead, PerHeadInput, PerRankAttributes, PerRankConfig, WholeNorm
from optimum_trn.patching.schedule import Selection
from optimum_trn.patching.styles import SharedInput

Layout = Literal["grouped", "blocked", "multi_query"]
Kind = Literal["queries", "keys", "groups"]

GROUPS = "num_key_value_groups"
"""The attribute of transformers' attention modules by which stock forwards repeat keys and values."""


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """What attention roles have in common; all of it is optional, and norms and tables count where a layer has them.

    `o` is the output projection.  `per_head_norms` act within a head with weights that all heads share, `whole_norms`
    take the root mean square over all heads.  `per_head` maps a parameter with entries for each head (sinks, biases,
    norm weights) to its dimension of heads.  `attributes` are numbers of heads or widths on the attention module that
    its forward reads, `config_attributes` those that it reads from its config.  `inputs` maps an argument of its
    forward that holds values for each head (ALiBi, a position bias) to its dimension of heads.  `memory` is the
    argument that a cross-attention makes keys and values from.  `num_heads` and `num_kv_heads` are names in the config.
    """

    o: str
    per_head_norms: tuple[str, ...] = ()
    whole_norms: tuple[str, ...] = ()
    per_head: Mapping[str, int] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    config_attributes: tuple[str, ...] = ()
    inputs: Mapping[str, int] = field(default_factory=dict)
    memory: str | None = None
    num_heads: str = "num_attention_heads"
    num_kv_heads: str = "num_key_value_heads"

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.num_heads)

    def _layout(self, layers: Selection, config: Any) -> HeadLayout | None:
        heads = getattr(config, self.num_heads)
        return _uneven(HeadLayout(heads, getattr(config, self.num_kv_heads, None) or heads, layers.schedule.num_ranks))

    def _record_heads(
        self,
        layers: Selection,
        config: Any,
        entries: Sequence[str],
        layout: HeadLayout | None,
        others: Sequence[str] = (),
    ) -> None:
        region = parent(entries)
        per_head = tuple(self.per_head)
        require_known(layers, region, (*entries, self.o, *others, *self.per_head_norms, *self.whole_norms, *per_head))
        for path in self.per_head_norms:
            for selection in present(layers, path):
                selection[path].sync("weight gradients", "all_reduce")
        for path in self.whole_norms:
            for selection in present(layers, path):
                selection[path].replace(WholeNorm(_blocks(layout, _sizes(selection, f"{path}.weight", 0))))
        for path, dim in self.per_head.items():
            owner, _, name = path.rpartition(".")
            for selection in present(layers, path):
                selection[owner].replace(PerHead(name, dim, _blocks(layout, _sizes(selection, path, dim))))
        attributes = self.attributes
        if layout is not None and layout.copies > 1 and any(hasattr(block, GROUPS) for block in layers[region]):
            attributes = tuple(dict.fromkeys((*attributes, GROUPS)))
        if attributes:
            layers[region].replace(PerRankAttributes(attributes, layout))
        if self.config_attributes:
            layers[region].replace(PerRankConfig(self.config_attributes, layout))
        for argument, dim in self.inputs.items():
            layers[region].replace(PerHeadInput(argument, dim, getattr(config, self.num_heads), layout))
        if self.memory is not None:
            layers[region].replace(SharedInput(self.memory))
        leave(layers, self.o, _blocks(layout, _sizes(layers, f"{self.o}.weight", _input_dim(layers[self.o]))))


@dataclass(frozen=True, kw_only=True)
class Attention(_Heads):
    """Multi-head, grouped-query or cross-attention with separate projections.

    `more` are further projections into heads, of the same input or of `memory`, where a layer has them.  `after` are
    modules behind the output projection in an attention that adds its own residual: there the projections sum the
    gradient of their input one by one, since that of the residual is whole.
    """

    q: str
    k: str
    v: str
    more: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return self.q, self.k, self.v, self.o

    def record(self, layers: Selection, config: Any) -> None:
        layout = self._layout(layers, config)
        kinds: dict[str, Kind] = {self.q: "queries", self.k: "keys", self.v: "keys"}
        entries = {path: _blocks(layout, _sizes(layers, f"{path}.weight", 0), kind) for path, kind in kinds.items()}
        enter(layers, entries, shared=not self.after)
        for path in self.more:
            for selection in present(layers, path):
                column_wise(selection[path], _blocks(layout, _sizes(selection, f"{path}.weight", 0), "queries"))
        self._record_heads(layers, config, tuple(entries), layout, (*self.more, *self.after))


@dataclass(frozen=True, kw_only=True)
class FusedAttention(_Heads):
    """Attention with one projection for queries, keys and values.

    Its output features lie in blocks of all queries, all keys and all values ("blocked"), or head by head or group by
    group, each with its queries, keys and values ("grouped"); or there is a single key and value head after all queries
    ("multi_query").  `layout` may be a function of the config.  Where queries have a projection `q` of their own, as in
    a cross-attention, the fused one makes keys and values.
    """

    qkv: str
    q: str | None = None
    layout: Layout | Callable[[Any], Layout] = "grouped"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.qkv, self.o) if self.q is None else (self.qkv, self.o, self.q)

    def record(self, layers: Selection, config: Any) -> None:
        form = self.layout(config) if callable(self.layout) else self.layout
        widths = _sizes(layers, f"{self.qkv}.weight", 1 - _input_dim(layers[self.qkv]))
        if len(widths) != 1:
            raise PlanError(f"{layers[self.qkv].path}: the layers have different widths {sorted(widths)}.")
        heads = getattr(config, self.num_heads)
        kv_heads = 1 if form == "multi_query" else getattr(config, self.num_kv_heads, None) or heads
        width = widths.pop() // ((heads if self.q is None else 0) + 2 * kv_heads)
        layout = _uneven(HeadLayout(heads, kv_heads, layers.schedule.num_ranks))
        blocks: tuple[Block, ...] = ()
        if form != "grouped":
            keys: Block = kv_heads * width if layout is None else Heads(heads, kv_heads, width, "keys")
            queries: Block = heads * width if layout is None else Heads(heads, kv_heads, width)
            blocks = (keys, keys) if self.q else (queries, keys, keys)
        elif layout is not None:
            blocks = (Heads(heads, kv_heads, width, "groups"),)
        entries: dict[str, Sequence[Block]] = {self.qkv: blocks}
        if self.q is not None:
            sizes = _sizes(layers, f"{self.q}.weight", 1 - _input_dim(layers[self.q]))
            entries[self.q] = _blocks(layout, sizes, "queries")
        enter(layers, entries)
        self._record_heads(layers, config, tuple(entries), layout)


def _uneven(layout: HeadLayout) -> HeadLayout | None:
    """The layout, unless every rank simply has an equal run of query heads and of key-value heads."""
    return layout if layout.num_kv_heads % layout.num_ranks else None


def _sizes(layers: Selection, parameter: str, dim: int) -> set[int]:
    """The sizes that a parameter has along `dim` in the layers."""
    owner, _, name = parameter.rpartition(".")
    return {module.get_parameter(name).shape[dim] for module in (layers[owner] if owner else layers)}


def _input_dim(linears: Selection) -> int:
    return 0 if any(isinstance(linear, Conv1D) for linear in linears) else 1


def _blocks(layout: HeadLayout | None, sizes: set[int], kind: Kind | None = None) -> tuple[Block, ...]:
    """A dimension of one size in all layers, with entries for each head: for each query head unless `kind` says else.

    Empty where equal runs do.  `PlanError` if the layers differ, which a layout of heads does not describe.
    """
    if layout is None:
        return ()
    if len(sizes) != 1:
        raise PlanError(
            f"{layout.num_heads} query heads and {layout.num_kv_heads} key-value heads do not go into "
            f"{layout.num_ranks} equal parts, and the layers have projections of different widths {sorted(sizes)}. "
            "Choose a tensor_parallel_size that divides the number of key-value heads."
        )
    size = sizes.pop()
    if kind is None:
        kind = "keys" if size % layout.num_heads else "queries"
    counts = {"queries": layout.num_heads, "keys": layout.num_kv_heads}
    counts["groups"] = layout.num_heads + 2 * layout.num_kv_heads
    return (Heads(layout.num_heads, layout.num_kv_heads, size // counts[kind], kind),)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(_Heads):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): low-rank projections go up into the heads.

    `down` are the replicated projections and norms before the heads, which see the partial gradients of this rank's
    heads; `up` are the projections into heads, `q` among them where queries have no low rank.
    """

    down: tuple[str, ...]
    up: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.o,)

    def sizes(self, config: Any) -> Mapping[str, int]:
        return size_of(config, self.num_heads)

    def record(self, layers: Selection, config: Any) -> None:
        everything = (*self.down, *self.up)
        heads = getattr(config, self.num_heads)
        layout = _uneven(HeadLayout(heads, heads, layers.schedule.num_ranks))
        layers[parent(everything)].sync("input gradient", "all_reduce")
        for path in self.down:
            for selection in present(layers, path):
                selection[path].sync("weight gradients", "all_reduce")
        for path in self.up:
            for selection in present(layers, path):
                column_wise(selection[path], _blocks(layout, _sizes(selection, f"{path}.weight", 0)))
        self._record_heads(layers, config, everything, layout)
