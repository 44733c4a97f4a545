"""The ways in which a recognised part may be cut, likely ones first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from optimum_trn.patching.blocks.region import Kind, Region
from optimum_trn.patching.recognise import Part
from optimum_trn.patching.trace import Trace, features

HEADS = re.compile(r"(^|_)(n_?)?(num_)?(\w+_)?(heads?|nheads)(_kv|_q|_per_partition)?$|^h$|num_query_groups", re.I)
OF_KEYS = re.compile(r"kv|key_value|_k_heads|groups")
NEVER = re.compile(r"head_dim|head_size|d_head|dim_head|layer_id|value_proj_dim|num_key_value_groups|^training$|^_")
DOWN = re.compile(r"(q_a_proj|kv_a_proj|kv_a_proj_with_mqa|q_down_proj|kv_down_proj|wq_a|wkv_a|o_a_proj)|index", re.I)
CONFIG_HEADS = ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads")
MANY = 64


def candidates(parts: Sequence[Part], model: nn.Module, trace: Trace) -> Iterator[Region]:
    """At most a few dozen regions for parts of the same structure of a traced model."""
    if parts[0].kind == "attention":
        found = attentions(parts, model, trace)
    else:
        found = {"mlp": feed_forwards, "experts": experts}[parts[0].kind](parts[0], model, trace)
    return itertools.islice(found, MANY)


class Heads:
    """The numbers of heads of one attention, and what they are called."""

    def __init__(self, part: Part, block: nn.Module, model: nn.Module, trace: Trace) -> None:
        path = f"{part.layer}.{part.owner}".strip(".")
        config = getattr(block, "config", None) or getattr(model, "config", None)
        numbers = {name: value for name, value in vars(block).items() if _is_number(value) and HEADS.search(name)}
        measured = next((count for name, count in trace.heads.items() if f"{name}.".startswith(f"{path}.")), None)
        named = next((value for name, value in numbers.items() if not OF_KEYS.search(name)), None)
        configured = next((v for name in CONFIG_HEADS if _is_number(v := getattr(config, name, None))), None)
        # Scores have a dimension of heads, usually the second: a number of that name is the better evidence.
        width = part.widths[part.row].input if part.row is not None else 0
        fitting = [count for count in (named, measured, configured) if count and width % count == 0]
        self.count: int | None = fitting[0] if fitting else None
        self.name = self._name(self.count, numbers, config, keys=False)
        own = [part.widths[name].output for name, role in part.columns.items() if role == "q"]
        assert part.row is not None
        self.width = own[0] if own else part.widths[part.row].input
        self.keys = self._keys(part, numbers, config)
        self.keys_name = self._name(self.keys, numbers, config, keys=True) if self.keys != self.count else None

    @property
    def dim(self) -> int:
        """The width of a query head."""
        return self.width // self.count if self.count else 0

    def _keys(self, part: Part, numbers: dict[str, int], config: Any) -> int | None:
        named = next((value for name, value in numbers.items() if OF_KEYS.search(name) and "groups" not in name), None)
        if named is None:
            named = getattr(config, "num_key_value_heads", None)
        roles = {role: part.widths[name].output for name, role in part.columns.items()}
        if {"q", "k"} <= roles.keys() and self.count:
            if roles["k"] == roles["q"]:
                return self.count
            by_width = roles["k"] // max(self.dim, 1)
            return named if _is_number(named) and named and roles["k"] % named == 0 else by_width
        if "kv" in roles or not _is_number(named):
            return self.count if not ("kv" in roles and _is_number(named)) else named
        return named

    def _name(self, count: int | None, numbers: dict[str, int], config: Any, keys: bool) -> str | None:
        found = [name for name, value in numbers.items() if value == count and bool(OF_KEYS.search(name)) == keys]
        if found:
            return found[0]
        names = ("num_key_value_heads", "num_kv_heads") if keys else CONFIG_HEADS
        return next((name for name in names if getattr(config, name, None) == count), None)


def attentions(parts: Sequence[Part], model: nn.Module, trace: Trace) -> Iterator[Region]:
    """Attentions: what is cut beside the projections, in which layout, and which numbers their forward reads."""
    part = parts[0]
    block = _block(part, model)
    heads = Heads(part, block, model, trace)
    if not heads.count or part.row is None:
        return
    extra = _Extras()
    for other in parts:
        own = Heads(other, _block(other, model), model, trace)
        if own.count:
            extra.collect(other, _block(other, model), own, trace)
    bases = list(_layouts(part, heads))
    choices = list(_numbers(part, block, heads))
    inputs = {name: dim for other in parts for name, dim in _inputs(other, model, trace, heads).items()}
    switched = list(dict.fromkeys(extra.switches()))
    seen = set()

    order: list[Any] = [(bases[0], n, switched[0], {}) for n in choices[:4]]
    if inputs:  # unless the first layer makes them, of its own heads
        order += [(bases[0], n, switched[0], {"inputs": {}}) for n in choices[:10]]
    order += [(bases[0], n, switched[0], {"local_widths": True}) for n in choices[:4]]
    order += [(b, n, s, {}) for b in bases for n in choices[:6] for s in switched[:1]]
    order += [(bases[0], n, s, {}) for s in switched[1:6] for n in choices[:4]]
    order += [(b, n, switched[0], {"local_widths": True}) for n in choices[:4] for b in bases[:2]]
    order += [(bases[0], n, s, {"local_widths": True}) for s in switched[1:4] for n in choices[:2]]
    if inputs:
        order += [(b, n, s, {"inputs": {}}) for b in bases for n in choices[:4] for s in switched[:2]]
    order += [(bases[0], n, switched[0], {}) for n in choices[6:]]
    order += [(b, n, s, {}) for s in switched[1:] for b in bases for n in choices[:3]]
    for base, numbers, off, more in order:
        inputs_of = {"inputs": inputs, **more}
        made = replace(
            base,
            more=extra.columns(off),
            cut={**extra.cut(off), **_followers(base.columns, part, model)},
            whole_norms=extra.norms(off),
            attributes=numbers[0],
            config_attributes=numbers[1],
            **inputs_of,
        )
        if str(made) not in seen:
            seen.add(str(made))
            yield made


def _layouts(part: Part, heads: Heads) -> Iterator[Region]:
    roles = {role: path for path, role in part.columns.items()}
    assert part.row is not None
    common = dict(rows={part.row: "queries"}, owner=part.owner, num_heads=heads.name, num_kv_heads=heads.keys_name)
    single: dict[str, Kind] = {"q": "queries", "k": "keys", "v": "keys", "kv": "pairs", "qk": "halves"}

    def columns(**kinds: Kind) -> dict[str, Kind]:
        return {path: kinds.get(role, single.get(role, "queries")) for path, role in part.columns.items()}

    if "qkv" in roles:
        layouts: tuple[Kind, ...] = ("blocked", "groups", "even", "halves")
        if heads.keys == heads.count:
            layouts = ("groups", "blocked", "even")
        for kind in layouts:
            yield Region(columns=columns(qkv=kind), **common)  # type: ignore[arg-type]
    elif "kv" in roles:
        for kind in ("pairs", "queries", "keys", "even"):
            yield Region(columns=columns(kv=kind), **common)  # type: ignore[arg-type]
    else:
        yield Region(columns=columns(), **common)  # type: ignore[arg-type]
        yield Region(columns=columns(q="halves", k="halves", v="halves"), **common)  # type: ignore[arg-type]
        if heads.keys != heads.count:
            yield Region(columns=columns(k="queries", v="queries"), **common)  # type: ignore[arg-type]


def _followers(columns: Mapping[str, Kind], part: Part, model: nn.Module) -> dict[str, tuple[int, Kind]]:
    """What lies beside a linear in a wrapper of it, such as a batch norm of its output, and is cut as the output is."""
    found: dict[str, tuple[int, Kind]] = {}
    for path, kind in columns.items():
        wrapper = path.rpartition(".")[0]
        if not wrapper or wrapper == part.owner:
            continue
        for name, module in model.get_submodule(f"{part.layer}.{wrapper}").named_children():
            if f"{wrapper}.{name}" == path or features(module) is not None:
                continue
            for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if value is not None and value.shape == (part.widths[path].output,):
                    found[f"{wrapper}.{name}.{key}"] = (0, kind)
    return found


class _Extras:
    """What an attention has beside its projections: further linears, tables and norms over heads."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.linears: dict[str, bool] = {}
        self.tables: dict[str, tuple[int, Kind]] = {}
        self.no_tables: set[str] = set()
        self.whole: list[str] = []

    def collect(self, part: Part, block: nn.Module, heads: Heads, trace: Trace) -> None:
        """Adds what one attention has."""
        assert heads.count
        start = f"{part.owner}." if part.owner else ""
        keys = heads.keys or heads.count
        key_width = keys * heads.dim
        sizes: dict[int, Kind] = {heads.count: "queries", heads.width: "queries", 2 * heads.width: "queries"}
        if keys not in (heads.count, 1):
            sizes.setdefault(key_width, "keys")
        for name, module in block.named_modules():
            path = f"{start}{name}"
            if path in part.columns or path == part.row:
                continue
            own = features(module) if name else None
            if own is not None:
                if path in part.widths:
                    direct = "." not in name
                    usual = own.output in (sizes if direct else (heads.count, heads.width))
                    if own.output in sizes or own.output % heads.count == 0:
                        self.kinds[path] = sizes.get(own.output, "queries")
                        self.linears[path] = usual and not DOWN.search(name)
                continue
            self._own(name, path, module, heads, key_width, sizes)
            width = trace.widths.get(f"{part.layer}.{path}")
            norm = "norm" in type(module).__name__.lower() and not list(module.parameters())
            if name and norm and width == heads.width != heads.dim:
                self.whole.append(path)

    def _own(
        self, name: str, path: str, module: nn.Module, heads: Heads, key_width: int, sizes: dict[int, Kind]
    ) -> None:
        norm = re.search("norm", type(module).__name__ + name, re.I) and not isinstance(
            module, nn.modules.batchnorm._BatchNorm
        )
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, value in own:
            if value is None or not value.is_floating_point():
                continue
            full = f"{path}.{key}" if name else (f"{path}{key}" if path.endswith(".") or not path else f"{path}.{key}")
            if norm and value.dim() == 1:
                if value.shape[0] in (heads.width, key_width) and value.shape[0] != heads.dim and name:
                    self.whole.append(path)
                continue
            dims = sorted(
                (
                    dim
                    for dim in range(value.dim())
                    if value.shape[dim] in sizes and value.shape[dim] != 2 * heads.width
                ),
                key=lambda dim: value.shape[dim] != heads.count,
            )
            if isinstance(module, nn.modules.conv._ConvNd):
                dims = [dim for dim in dims if dim == 0]
            if not dims:  # of the same size as the heads of another layer by chance
                self.no_tables.add(full.lstrip("."))
                self.tables.pop(full.lstrip("."), None)
            if dims:
                dim = value.dim() - 1 if isinstance(module, nn.Embedding) else dims[0]
                if value.shape[dim] in sizes and full.lstrip(".") not in self.no_tables:
                    self.tables[full.lstrip(".")] = (dim, sizes[value.shape[dim]])

    def switches(self) -> Iterator[frozenset[str]]:
        """What to leave out, or take in, against the usual: nothing, all of a kind, single ones, pairs."""
        every = [*self.linears, *self.tables, *dict.fromkeys(self.whole)]
        yield frozenset()
        yield frozenset(self.tables)
        yield frozenset(self.whole)
        yield frozenset((*self.tables, *self.whole))
        yield frozenset(every)
        for name in every:
            yield frozenset([name])
        for pair in itertools.combinations(every, 2):
            yield frozenset(pair)

    def columns(self, off: frozenset[str]) -> dict[str, Kind]:
        """The further linears that are cut, those in `off` the other way round."""
        return {path: self.kinds[path] for path, usual in self.linears.items() if usual != (path in off)}

    def cut(self, off: frozenset[str]) -> dict[str, tuple[int, Kind]]:
        """The tables that are cut, but those in `off`."""
        return {path: how for path, how in self.tables.items() if path not in off}

    def norms(self, off: frozenset[str]) -> tuple[str, ...]:
        """The norms over all heads, but those in `off`."""
        return tuple(path for path in dict.fromkeys(self.whole) if path not in off)


def _numbers(part: Part, block: nn.Module, heads: Heads) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Which numbers on modules, and in their config, may have to be those of a rank: fewer ones first."""
    assert heads.count and part.row is not None
    keys = heads.keys or heads.count
    width, key_width = heads.width, keys * heads.dim
    values = {heads.count, keys, width, part_output(part), key_width, 3 * width, width + 2 * key_width, 2 * key_width}
    start = f"{part.owner}." if part.owner else ""
    counts, widths, deep = [], [], []
    for name, module in block.named_modules():
        if features(module) is not None:
            continue
        for key, value in vars(module).items():
            if not _is_number(value) or value not in values or NEVER.search(key) or value == 1:
                continue
            path = f"{start}{name}.{key}" if name else f"{start}{key}"
            if name:
                deep.append(path)
            elif HEADS.search(key):
                counts.append(path)
            else:
                widths.append(path)
    config = getattr(block, "config", None)
    names = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
    configured = tuple(
        name for name in names if isinstance(v := getattr(config, name, None), int) and v > 1 and _is_number(v)
    )
    plain = [
        name for name in widths if not re.search(r"hidden_size$|embed_dim$|d_model$|\.dim$|^dim$|hidden_dim$", name)
    ]
    inner = [name for name in widths if re.search(r"inner|all_head|qkv|attn_dim|split_size", name)]
    sets = [(), tuple(counts), tuple(counts + inner), tuple(counts + widths), tuple(counts + plain)]
    sets += [(*counts, name) for name in widths]
    sets += [(*counts, *pair) for pair in itertools.combinations(widths, 2)]
    sets += [(name,) for name in counts]
    pairs: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(chosen, ()) for chosen in sets]
    pairs += [(tuple(counts), configured), ((), configured)]
    pairs += [(tuple(counts + deep), ()), (tuple(counts + widths + deep), ()), (tuple(deep), ()), (tuple(widths), ())]
    pairs += [((*counts, name), ()) for name in deep[:6]]
    if len(pairs) > 8 and configured:  # the config early, since few models need combinations
        pairs.insert(2, ((), configured))
        pairs.insert(3, (tuple(counts), configured))
    yield from dict.fromkeys(pairs)


def part_output(part: Part) -> int:
    """The width that the output projection takes."""
    assert part.row is not None
    return part.widths[part.row].input


def _inputs(part: Part, model: nn.Module, trace: Trace, heads: Heads) -> dict[str, int]:
    """Arguments of an attention that hold values for each head, by the dimension of heads."""
    found = {}
    path = f"{part.layer}.{part.owner}".strip(".")
    for name, shape in trace.arguments.get(path, {}).items():
        table = re.search("bias|alibi|rel|pos", name)
        if len(shape) == 5 and shape[2] == heads.count:
            found[name] = 2
        elif len(shape) == 4 and shape[1] == heads.count and (table or "mask" in name):
            found[name] = 1
        elif len(shape) == 3 and table and shape[0] % (heads.count or 1) == 0 and "embedding" not in name:
            found[name] = 0
    return found


def feed_forwards(part: Part, model: nn.Module, trace: Trace) -> Iterator[Region]:
    """Feed-forward parts: one or several linears up, one down, and what lies between them."""
    assert part.row is not None
    layer = model.get_submodule(part.layer)
    width = part.widths[part.row].input
    parents = {path.rpartition(".")[0] for path in (*part.columns, part.row)}
    fused = [path for path in part.columns if part.widths[path].output == 2 * width]
    cut: dict[str, tuple[int, Kind]] = {}
    norms, numbers, more = [], [], {}
    if width != part.widths[part.row].output:
        for path, module in layer.named_modules():
            near = path.rpartition(".")[0] in parents or any(
                parent and f"{path}.".startswith(f"{parent}.") for parent in parents
            )
            near = near or path in parents
            if path in (*part.columns, part.row) or not near:
                continue
            own = features(module) if path else None
            if own is not None:
                if own.output in (width, 2 * width) and own.input != width and path.rpartition(".")[0] in parents:
                    more[path] = own.output == 2 * width
                continue
            named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
            norm = re.search("norm|grn$", type(module).__name__ + path, re.I) and not batch
            for name, value in named:
                if value is None or width not in value.shape:
                    continue
                if norm:
                    norms.append(path)
                else:
                    cut[f"{path}.{name}".strip(".")] = (list(value.shape).index(width), "even")
            for name, value in vars(module).items():
                if _is_number(value) and value in (width, 2 * width) and not name.startswith("_"):
                    numbers.append(f"{path}.{name}".strip("."))
    same = len({path.rpartition(".")[0] for path in part.columns}) == 1
    owner = next(iter(part.columns)).rpartition(".")[0] if same else ""
    for kind in ("halves", "even") if fused else ("even",):
        columns: dict[str, Kind] = {path: kind if path in fused else "even" for path in part.columns}
        extra: dict[str, Kind] = {path: kind if twice else "even" for path, twice in more.items()}
        base = Region(columns=columns, more=extra, rows={part.row: "even"}, owner=owner)
        options: list[dict[str, Any]] = [
            dict(cut=chosen, whole_norms=tuple(dict.fromkeys(norm)), attributes=tuple(number))
            for chosen in ([cut, {}] if cut else [{}])
            for number in ([[], numbers] if numbers else [[]])
            for norm in ([norms, []] if norms else [[]])
        ]
        for option in options:
            yield replace(base, **option)
            if extra:
                yield replace(base, more={}, **option)


def experts(part: Part, model: nn.Module, trace: Trace) -> Iterator[Region]:
    """Experts whose weights one module holds: the intermediate axis of each is that which is not the hidden one."""
    block = model.get_submodule(f"{part.layer}.{part.owner}".strip("."))
    hidden = trace.widths.get(f"{part.layer}.{part.owner}".strip("."))
    own = {name: block.get_parameter(name) for name in part.parameters}
    others = dict(block.named_parameters(recurse=False))
    start = f"{part.owner}." if part.owner else ""
    order = sorted(own, key=lambda name: not re.search("down|w2|output|fc2|wo", name))
    for down, axis in itertools.product(order, (1, 2)):
        if own[down].dim() != 3 or own[down].shape[axis] != hidden:
            continue
        width = own[down].shape[3 - axis]
        dims, twice = {down: 3 - axis}, set()
        for name, weight in own.items():
            if name == down:
                continue
            fitting = [d for d in (1, 2) if weight.shape[d] in (width, 2 * width) and weight.shape[3 - d] == hidden]
            if not fitting:
                break
            dims[name] = fitting[0]
            if weight.shape[fitting[0]] == 2 * width:
                twice.add(name)
        if len(dims) < len(own):
            continue
        for name, value in others.items():
            if name not in own and value.shape[-1] in (width, 2 * width) and value.shape[-1] != hidden:
                dims[name] = value.dim() - 1
                if value.shape[-1] == 2 * width:
                    twice.add(name)
        numbers = tuple(
            f"{start}{name}" for name, value in vars(block).items() if _is_number(value) and value in (width, 2 * width)
        )
        for kind in ("halves", "even") if twice else ("even",):
            for chosen in ((), numbers) if numbers else ((),):
                yield Region(
                    columns={},
                    rows={},
                    cut={f"{start}{name}": (dim, kind if name in twice else "even") for name, dim in dims.items()},
                    sums=(part.owner,),
                    attributes=chosen,
                )


def _block(part: Part, model: nn.Module) -> nn.Module:
    return model.get_submodule(f"{part.layer}.{part.owner}".strip("."))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
