"""The most general role: a region of a layer that is cut, as data; what inferred plans consist of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optimum_trn.errors import PlanError
from optimum_trn.parallel.cuts import Block, HeadLayout, Heads
from optimum_trn.parallel.norm import ShardedRMSNorm
from optimum_trn.patching.blocks.role import column_wise, leave, present, size_of
from optimum_trn.patching.head_styles import PerHeadInput, PerRankAttributes, PerRankConfig, WholeNorm
from optimum_trn.patching.region_styles import CutModule, LocalWidths, SharedInputs, WholeNormOfAnyKind
from optimum_trn.patching.schedule import Selection
from optimum_trn.patching.styles import SAME_FORWARD, Style, SummedGradients

Kind = Literal["even", "halves", "queries", "keys", "groups", "blocked", "pairs"]
"""How a dimension lies: one run, or two; entries for each query head, or key-value head; groups of a key-value head
with its queries, its key and its value; all queries, then all keys, then all values; all keys, then all values."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a layer, from whole inputs to a sum over the ranks, by the paths of its modules within the layer.

    `columns` are linears cut by output features, `rows` by input features; `more` are further columns, where a layer
    has them; `cut` are other parameters and buffers by
    (dimension, kind).  `enters` is the module whose inputs are those of the region ("first": its first argument,
    "all": every tensor); without it, each of `columns` is entered on its own.  `sees` are modules and parameters that
    every rank holds whole and that see this rank's activations, so that their gradients are summed; `whole_norms`
    are norms over all heads, or all columns.  `sums` are modules, such as those of experts, whose own parameters are
    among `cut`, whose inputs are whole and whose outputs are to be summed.  `attributes` (by path) and
    `config_attributes` are numbers of heads or widths that the forward of the module `owner` reads from modules or from
    its config; `inputs` are arguments of it with values for each head, by dimension; `local_widths` says that it takes
    the width of its heads from its input.
    `num_heads` and `num_kv_heads` are names on that module or in the config.  A region that is `even_only` is proven
    only where the ranks divide its numbers of heads and columns.
    """

    columns: Mapping[str, Kind]
    rows: Mapping[str, Kind]
    more: Mapping[str, Kind] = field(default_factory=dict)
    cut: Mapping[str, tuple[int, Kind]] = field(default_factory=dict)
    owner: str = ""
    enters: Literal["first", "all"] | None = None
    sees: tuple[str, ...] = ()
    whole_norms: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    config_attributes: tuple[str, ...] = ()
    inputs: Mapping[str, int] = field(default_factory=dict)
    local_widths: bool = False
    even_only: bool = False
    num_heads: str | None = None
    num_kv_heads: str | None = None
    width: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows, *self.sums)

    def sizes(self, config: Any) -> Mapping[str, int]:
        names = [name for name in (self.num_heads, self.width) if name is not None]
        found = size_of(config, *names)
        return {name: size for name, size in found.items() if isinstance(size, int)}

    def record(self, layers: Selection, config: Any) -> None:
        for selection in present(layers, *self.paths):
            for alike, layout in self._by_layout(selection, config):
                self._record(alike, layout)

    def _record(self, layers: Selection, layout: HeadLayout | None) -> None:
        if self.even_only:
            self._require_even(layers, layout)
        if self.enters is not None:
            block = layers[self.owner] if self.owner else layers
            if self.enters == "first":
                block.sync("input gradient", "all_reduce")
            else:
                block.replace(SharedInputs())
        for path, kind in self.columns.items():
            self._column(layers, path, kind, layout)
        for path, kind in self.more.items():
            for selection in present(layers, path):
                self._column(selection, path, kind, layout)
        for path, kind in self.rows.items():
            self._row(layers, path, kind, layout)
        by_owner: dict[str, list[tuple[str, int, Kind]]] = {}
        for path, (dim, kind) in self.cut.items():
            owner, _, name = path.rpartition(".")
            by_owner.setdefault(owner, []).append((name, dim, kind))
        for owner, described in by_owner.items():
            for selection in present(layers, owner) if owner else [layers]:
                for one in selection.each():
                    modules = one[owner] if owner else one
                    module = next(iter(modules))
                    cuts = tuple(
                        (name, dim, _blocks(kind, value.shape[dim], layout))
                        for name, dim, kind in described
                        if isinstance(value := getattr(module, name, None), Tensor)
                    )
                    if cuts:
                        modules.replace(self._cut_module(owner, cuts, module))
        for path in self.whole_norms:
            for selection in present(layers, path):
                selection[path].replace(_whole_norm(next(iter(selection[path])), layout))
        self._record_summed(layers)
        block = layers[self.owner] if self.owner else layers
        owned: dict[str, list[str]] = {}
        for path in self.attributes:
            owner, _, name = path.rpartition(".")
            owned.setdefault(owner, []).append(name)
        uneven = layout if layout is not None and layout.num_kv_heads % layout.num_ranks else None
        for owner, names in owned.items():
            for selection in present(layers, owner) if owner else [layers]:
                modules = selection[owner] if owner else selection
                modules.replace(PerRankAttributes(tuple(names), uneven))
        if self.config_attributes:
            block.replace(PerRankConfig(self.config_attributes, uneven))
        for argument, dim in self.inputs.items():
            assert layout is not None
            block.replace(PerHeadInput(argument, dim, layout.num_heads, uneven))
        if self.local_widths:
            self._record_widths(layers, block, layout)

    def _require_even(self, layers: Selection, layout: HeadLayout | None) -> None:
        sizes = {path: _in_features(layers[path]) for path in self.rows}
        if layout is not None:
            sizes |= {"heads": layout.num_heads, "key-value heads": layout.num_kv_heads}
        for name, size in sizes.items():
            if size % layers.schedule.num_ranks and size != 1:
                raise PlanError(
                    f"{layers.path}: {layers.schedule.num_ranks} ranks do not divide {name} {size}, and how to cut "
                    "this part is proven only where they do. Choose a tensor_parallel_size that divides it."
                )

    def _cut_module(
        self, owner: str, cuts: tuple[tuple[str, int, tuple[Block, ...]], ...], module: nn.Module
    ) -> CutModule:
        if owner not in self.sums:
            return CutModule(cuts)
        names = {name for name, _, _ in cuts}
        once = tuple(name for name, _ in module.named_parameters(recurse=False) if name not in names)
        return CutModule(cuts, enters=True, leaves=True, added_once=once)

    def _record_summed(self, layers: Selection) -> None:
        owners: dict[str, list[str]] = {}
        for path in self.sees:
            owner, _, name = path.rpartition(".")
            owners.setdefault(owner, []).append(name)
        for owner, names in owners.items():
            for selection in present(layers, owner) if owner else [layers]:
                for one in selection.each():
                    module = next(iter(one[owner] if owner else one))
                    there = tuple(name for name in names if module._parameters.get(name) is not None)
                    if there:
                        (one[owner] if owner else one).replace(SummedGradients(there))

    def _record_widths(self, layers: Selection, block: Selection, layout: HeadLayout | None) -> None:
        numbers: dict[int, None] = {}
        for path in self.rows:
            numbers[_in_features(layers[path])] = None
        if layout is not None:
            numbers[layout.num_heads] = None
        for one in block.each():
            one.replace(LocalWidths(tuple(numbers)))

    def _column(self, layers: Selection, path: str, kind: Kind, layout: HeadLayout | None) -> None:
        linears = layers[path]
        blocks = _blocks(kind, _out_features(linears), layout)
        if _stock(linears):
            column_wise(linears, blocks)
            if self.enters is None:
                linears.sync("input gradient", "all_reduce")
            return
        module = next(iter(linears))
        cuts = tuple(
            (name, _out_dim(module) if name == "weight" else parameter.dim() - 1, blocks)
            for name, parameter in module.named_parameters(recurse=False)
            if name == "weight" or parameter.shape[-1] == _out_features(linears)
        )
        linears.replace(CutModule(cuts, enters=self.enters is None))

    def _row(self, layers: Selection, path: str, kind: Kind, layout: HeadLayout | None) -> None:
        linears = layers[path]
        blocks = _blocks(kind, _in_features(linears), layout)
        if _stock(linears):
            leave(layers, path, blocks)
            return
        module = next(iter(linears))
        names = tuple(name for name, _ in module.named_parameters(recurse=False) if name != "weight")
        linears.replace(CutModule((("weight", 1 - _out_dim(module), blocks),), leaves=True, added_once=names))

    def _by_layout(self, layers: Selection, config: Any) -> Iterator[tuple[Selection, HeadLayout | None]]:
        """The layers, one by one where their numbers of heads, or the sizes of what is cut in blocks, differ."""
        every = list(layers.each())
        described = [(self._numbers(one, config), self._sizes(one)) for one in every]
        together = all(other == described[0] for other in described)
        for one in [layers] if together else every:
            heads, kv_heads = self._numbers(one, config)
            yield one, None if heads is None else HeadLayout(heads, kv_heads or heads, layers.schedule.num_ranks)

    def _sizes(self, layer: Selection) -> list[tuple[int, ...]]:
        linears = (*self.columns, *self.rows)
        return [tuple(next(iter(layer[path])).get_parameter("weight").shape) for path in linears]

    def _numbers(self, layers: Selection, config: Any) -> tuple[int | None, int | None]:
        block = next(iter(layers[self.owner] if self.owner else layers))
        return _number(self.num_heads, block, config), _number(self.num_kv_heads, block, config)


def _whole_norm(norm: nn.Module, layout: HeadLayout | None) -> Style:
    own = dict(norm.named_parameters())
    if list(own) == ["weight"] and ShardedRMSNorm.epsilon_of(norm) and not isinstance(norm, nn.LayerNorm):
        size = own["weight"].shape[0]
        kind: Kind = "even" if layout is None else "keys" if size % layout.num_heads else "queries"
        return WholeNorm(_blocks(kind, size, layout))
    _blocks("even", 0, layout)  # which refuses heads that the ranks do not divide
    return WholeNormOfAnyKind()


def _number(name: str | None, block: nn.Module, config: Any) -> int | None:
    for holder in (block, getattr(block, "config", None), config):
        value = None if name is None else getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None


def _stock(linears: Selection) -> bool:
    return all(SAME_FORWARD.get(type(linear).__name__, type(linear)) in (nn.Linear, Conv1D) for linear in linears)


def _out_dim(linear: nn.Module) -> int:
    return 1 if isinstance(linear, Conv1D) else 0


def _out_features(linears: Selection) -> int:
    module = next(iter(linears))
    return module.get_parameter("weight").shape[_out_dim(module)]


def _in_features(linears: Selection) -> int:
    module = next(iter(linears))
    return module.get_parameter("weight").shape[1 - _out_dim(module)]


def _blocks(kind: Kind, size: int, layout: HeadLayout | None) -> tuple[Block, ...]:
    """The blocks of a dimension of `size`; none where equal runs do."""
    if kind == "halves":
        return (size // 2,) * 2
    if layout is None or kind == "even":
        if layout is not None and layout.num_kv_heads % layout.num_ranks:
            raise PlanError(
                f"{layout.num_ranks} ranks do not divide {layout.num_heads} heads and {layout.num_kv_heads} key-value "
                "heads, and something in this attention can only be cut in equal runs. Choose a tensor_parallel_size "
                "that does."
            )
        return ()
    heads, kv_heads = layout.num_heads, layout.num_kv_heads
    even = kv_heads % layout.num_ranks == 0
    if kind in ("queries", "keys", "groups"):
        count = {"queries": heads, "keys": kv_heads, "groups": heads + 2 * kv_heads}[kind]
        return () if even else (Heads(heads, kv_heads, size // count, kind),)
    width = size // (2 * kv_heads if kind == "pairs" else heads + 2 * kv_heads)
    keys: Block = kv_heads * width if even else Heads(heads, kv_heads, width, "keys")
    queries: Block = heads * width if even else Heads(heads, kv_heads, width)
    return (keys, keys) if kind == "pairs" else (queries, keys, keys)
