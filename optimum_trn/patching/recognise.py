"""Recognises attention and feed-forward parts by structure: names for roles, shapes for widths, order of calls.

What it finds are candidates only: `optimum_trn.patching.infer` proves them.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from optimum_trn.patching.trace import Features, Trace, features

PartKind = Literal["attention", "mlp", "experts"]

NOT_SPLIT = re.compile(
    r"Mamba|Rwkv|GatedDelta|ShortConv|Lightning|RgLru|[xm]LSTM|KimiDelta|DeltaNet|DeltaAttention|SSM|LinearAttention"
)
"""Classes of state-space and linear-attention mixers, whose projections are not those of heads or of a plain MLP."""

MIXER_CHILDREN = {"A_log", "dt_bias", "conv1d", "receptance"}


ADAPTER = re.compile(r"per_layer|adapter|lora|reduction|squeeze|compress")
"""Paths of small bottlenecks beside the attention and feed-forward parts, which stay whole."""


def named_like(*words: str) -> re.Pattern[str]:
    """Names of a projection of one of `words`, with the usual decorations."""
    before = r"(w|w_|to_|linear_|lin_|proj_|project_|projection_)?"
    after = r"(_?(proj|projection|lin|linear|layer|head|attn|global|network|net|up_proj|up|b_proj|gate_proj|b))?"
    return re.compile(f"^{before}({'|'.join(words)}){after}$", re.IGNORECASE)


ROLES = {
    "q": named_like("q", "query", "queries"),
    "k": named_like("k", "key", "keys"),
    "v": named_like("v", "value", "values"),
    "qkv": re.compile(
        r"^(qkv|query_key_value|c_attn|wqkv|in_proj|att_proj|queries_keys_values)(_proj|_linear)?$|^wqkv_proj$|^to_qkv$|^layernorm_qkv$",
        re.I,
    ),
    "kv": re.compile(r"^(kv|c_kv|to_kv|key_value|keys_values|wkv)(_proj|_b_proj|_up_proj|_b|_linear)?$", re.I),
    "qk": re.compile(r"^(query_key|qk_proj|qk)$", re.I),
    "o": re.compile(
        r"^(o|wo|dense|c_proj|to_out|out|output|proj|projection|post_proj|attention_out|project_out|w_o)"
        r"(_proj|_lin|_linear|_projection|_out|_b_proj)?$|^linear_(o|out|post)$|^proj_out$|^dense_proj$",
        re.I,
    ),
}


@dataclass
class Part:
    """One attention or feed-forward part: paths from the layer that contains it, which `stack` matches with others.

    `columns` and `row` are linears by role; `owner` is the module whose forward they belong to.
    """

    kind: PartKind
    layer: str
    stack: str
    owner: str
    columns: dict[str, str]
    row: str | None
    widths: dict[str, Features] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What parts of the same structure have in common."""
        return self.stack, self.owner, tuple(sorted(self.columns.items())), self.row, self.parameters

    def __str__(self) -> str:
        inner = self.owner or ".".join(os.path.commonprefix([path.split(".") for path in self.columns]))
        return f"{self.stack}.*{'.' if inner else ''}{inner}"


def mixes_states(module: nn.Module) -> bool:
    """Whether a module is a state-space or linear-attention mixer."""
    name = type(module).__name__
    if any(child in module._modules for child in ("kv_b_proj", "kv_a_proj_with_mqa")) or "Norm" in name:
        return False
    children = {*module._parameters, *module._modules}
    if children & MIXER_CHILDREN and any(features(child) is not None for child in module.children()):
        return True
    outer = re.search(r"(Layer|Block|Model|Decoder|MLP|Mlp|Experts?|MoE|Router|FeedForward|Gate|ForCausalLM|LM)$", name)
    attends = re.search(r"(?<!Lightning)(?<!Linear)(?<!Delta)Attention$", name)
    return bool(NOT_SPLIT.search(name)) and not outer and not attends


def linears_in(module: nn.Module) -> dict[str, tuple[str, Features]]:
    """By the name of a child: the path and widths of the linear that it is, or the only one that it wraps."""
    found = {}
    for name, child in module.named_children():
        own = features(child)
        if own is not None:
            found[name] = (name, own)
        elif not isinstance(child, nn.ModuleList) and sum(1 for _ in child.modules()) <= 6:
            inner = [(path, f) for path, m in child.named_modules() if path and (f := features(m)) is not None]
            if len(inner) == 1:
                found[name] = (f"{name}.{inner[0][0]}", inner[0][1])
    return found


def role_of(name: str) -> str | None:
    """What a projection is for, by its name."""
    return next((role for role, pattern in ROLES.items() if pattern.match(name)), None)


def attention_roles(module: nn.Module, nested: bool = False) -> dict[str, str] | None:
    """Paths of the projections of an attention by role; None for a module that has not all of them."""
    if mixes_states(module) or isinstance(module, nn.MultiheadAttention):
        return None
    if nested:
        found = {}
        for path, inner in module.named_modules():
            if path and features(inner) is not None:
                role = role_of(path.split(".")[0]) or role_of(path.split(".")[-1])
                if role is not None:
                    found[path] = role
    else:
        found = {path: role for name, (path, _) in linears_in(module).items() if (role := role_of(name)) is not None}
    have = set(found.values())
    attends = "att" in type(module).__name__.lower()
    if not ({"q", "k", "v"} <= have or "qkv" in have or {"q", "kv"} <= have or {"qk", "v"} <= have):
        if not (attends and len(have & {"q", "k", "v"}) > 1 and not nested):
            return None
    if "in_proj" in found and "att" not in (type(module).__name__ + " ".join(found)).lower():
        return None
    return found


class Recogniser:
    """Finds the parts of one traced model."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model = model
        self.trace = trace
        self.modules = dict(model.named_modules())
        self.taken: set[str] = set()
        trace.linears[:] = [path for path in trace.linears if self._multiplies(path)]
        self.first = {path: index for index, path in reversed(list(enumerate(trace.linears)))}
        self.mixers = [path for path in trace.called if path and mixes_states(self.modules[path])]

    def _multiplies(self, path: str) -> bool:
        """Not a convolution over single points, unless it is a linear of an attention or a feed-forward part."""
        if not isinstance(self.modules[path], nn.modules.conv._ConvNd):
            return True
        outer = [path.rpartition(".")[0], path.rpartition(".")[0].rpartition(".")[0]]
        return any(
            re.search("Mlp|MLP|FFN|FeedForward|Attention|PoolFormerOutput", type(self.modules[name]).__name__)
            for name in outer
        )

    def parts(self) -> list[Part]:
        """All parts, those of the same structure one after the other."""
        return [*self._attentions(), *self._feed_forwards()]

    # Attention --------------------------------------------------------------------------------------------------------

    def _attentions(self) -> Iterator[Part]:
        called = [path for path in self.modules if path in self.trace.called]
        direct = {path: roles for path in called if (roles := attention_roles(self.modules[path])) is not None}
        for path in called:
            roles = direct.get(path)
            if roles is None and path in self.trace.heads and not any(d.startswith(f"{path}.") for d in direct):
                roles = attention_roles(self.modules[path], nested=True)
            if roles is None or any(f"{path}.{linear}" in self.taken for linear in roles):
                continue
            yield from self._attention(path, dict(roles))

    def _attention(self, path: str, roles: dict[str, str]) -> Iterator[Part]:
        module = self.modules[path]
        every = {
            f"{path}.{name}": own
            for name, inner in module.named_modules()
            if name and (own := features(inner)) is not None and f"{path}.{name}" in self.first
        }
        roles = {f"{path}.{name}": role for name, role in roles.items() if f"{path}.{name}" in self.first}
        if not any(role != "o" for role in roles.values()):
            return
        outputs = sorted((name for name, role in roles.items() if role == "o"), key=self._last)
        row = outputs[-1] if outputs else self._output_inside(path, roles, every) or self._output_after(path, every)
        roles = {name: role for name, role in roles.items() if role != "o"}
        if row is None or not roles:
            return
        self.taken |= {*every, row}
        widths = {**every, row: features(self.modules[row])}
        yield from self._part("attention", path, roles, row, widths)

    def _last(self, path: str) -> int:
        return max((index for index, name in enumerate(self.trace.linears) if name == path), default=-1)

    def _output_inside(self, path: str, roles: dict[str, str], every: dict[str, Features]) -> str | None:
        """A linear of another name that is the last one to be called in the attention and takes its width."""
        wide = max(every[name].output for name in roles)
        last = max(every, key=self._last)
        return last if last not in roles and every[last].input == wide else None

    def _output_after(self, path: str, every: dict[str, Features]) -> str | None:
        """The linear that is called next after those of the attention, not far from it."""
        order = self.trace.linears
        start = next((index for index, name in enumerate(order) if name in every), None)
        if start is None:
            return None
        while start < len(order) and order[start] in every:
            start += 1
        if start == len(order):
            return None
        common = _common([path, order[start]])
        near = common and len(path.split(".")) - len(common.split(".")) <= 3
        return order[start] if near else None

    # Feed-forward -----------------------------------------------------------------------------------------------------

    def _feed_forwards(self) -> Iterator[Part]:
        for path, module in self.modules.items():
            if path in self.trace.called and not self._in_mixer(path):
                yield from self._experts(path, module)
        for path, module in self.modules.items():
            if path in self.trace.called and not self._in_mixer(path):
                yield from self._side_by_side(path, module)
        yield from self._in_a_row()

    def _in_mixer(self, path: str) -> bool:
        return any(path == mixer or path.startswith(f"{mixer}.") for mixer in self.mixers)

    def _experts(self, path: str, module: nn.Module) -> Iterator[Part]:
        """A module that holds the weights of all experts as parameters of its own."""
        own = dict(module.named_parameters(recurse=False))
        stacked = [name for name, parameter in own.items() if parameter.dim() == 3 and min(parameter.shape) > 1]
        flat = [name for name in own if re.match(r"^(w1|v1|w2)$", name)]
        if "Attention" in type(module).__name__ or features(module) is not None:
            return
        names = stacked if len(stacked) >= 2 else flat if len(flat) == 3 else []
        if names:
            self.taken |= {f"{path}.{name}" for name in names}
            yield from self._part("experts", path, {}, None, {}, tuple(names))

    def _side_by_side(self, path: str, module: nn.Module) -> Iterator[Part]:
        """Linears of one module, of which one takes the width that the others give."""
        every = {
            f"{path}.{inner}".strip("."): own
            for inner, own in linears_in(module).values()
            if f"{path}.{inner}".strip(".") in self.first and f"{path}.{inner}".strip(".") not in self.taken
        }
        for down, own in every.items():
            ups = [name for name, other in every.items() if name != down and self._feeds(name, other, down, own)]
            if any(ADAPTER.search(name) for name in (*ups, down)):
                continue
            if ups and not self.taken.intersection((*ups, down)):
                self.taken |= {*ups, down}
                roles = dict.fromkeys(ups, "up")
                yield from self._part("mlp", path, roles, down, {name: every[name] for name in (*ups, down)})

    def _feeds(self, up: str, wide: Features, down: str, narrow: Features) -> bool:
        if self.first[up] > self.first[down] or wide.input != narrow.output:
            return False
        if narrow.input == narrow.output:
            downwards = re.compile(r"down|fc2|w2|wo|output|dense2|dense_4h|c_proj|lin2|linear2|proj_out")
            named = downwards.search(down.rpartition(".")[2]) and not downwards.search(up.rpartition(".")[2])
            return bool(named) and wide.output == narrow.input
        return wide.output in (narrow.input, 2 * narrow.input)

    def _in_a_row(self) -> Iterator[Part]:
        """Linears of neighbouring modules that are called one after the other."""
        order = [path for path in dict.fromkeys(self.trace.linears) if not self._in_mixer(path)]
        for index, up in enumerate(order):
            if up in self.taken:
                continue
            ups, wide = [up], self._features(up)
            for down in order[index + 1 : index + 3]:
                if down in self.taken:
                    break
                narrow = self._features(down)
                if wide == narrow and wide.input != wide.output:
                    if up.rpartition(".")[0] == down.rpartition(".")[0]:
                        ups.append(down)
                    continue
                fits = wide.output in (narrow.input, 2 * narrow.input) and wide.input == narrow.output
                if not fits or narrow.input == narrow.output:
                    continue
                owner = _common([*ups, down])
                far = not owner or len(up.split(".")) - len(owner.split(".")) > 4
                far = far or any(ADAPTER.search(name) for name in (*ups, down))
                if far or isinstance(self.modules[owner], nn.ModuleList) or owner not in self.trace.called:
                    continue
                self.taken |= {*ups, down}
                widths = {name: self._features(name) for name in (*ups, down)}
                yield from self._part("mlp", owner, dict.fromkeys(ups, "up"), down, widths)
                break

    def _features(self, path: str) -> Features:
        found = features(self.modules[path])
        assert found is not None
        return found

    # Paths ------------------------------------------------------------------------------------------------------------

    def _part(
        self,
        kind: PartKind,
        owner: str,
        roles: dict[str, str],
        row: str | None,
        widths: Mapping[str, Features | None],
        parameters: tuple[str, ...] = (),
    ) -> Iterator[Part]:
        layer = self._layer(_common([owner, *([row] if row else [])], inclusive=True))
        if not layer:
            return
        start = len(layer) + 1
        yield Part(
            kind,
            layer,
            self._pattern(layer.rpartition(".")[0]),
            owner[start:],
            {name[start:]: role for name, role in roles.items()},
            row[start:] if row else None,
            {name[start:]: own for name, own in widths.items() if own is not None},
            parameters,
        )

    def _layer(self, path: str) -> str:
        """The innermost element of a module list that contains `path`, or `path` itself if none does."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            if self._is_element(".".join(parts[:end])):
                return ".".join(parts[:end])
        return path

    def _is_element(self, path: str) -> bool:
        return isinstance(self.modules[path.rpartition(".")[0]], (nn.ModuleList, nn.ModuleDict, nn.Sequential))

    def _pattern(self, path: str) -> str:
        parts = path.split(".")
        return ".".join(
            "*" if self._is_element(".".join(parts[: index + 1])) else part for index, part in enumerate(parts)
        )


def _common(paths: Sequence[str], inclusive: bool = False) -> str:
    """The path of the innermost module that contains all of `paths`, or is the only one of them."""
    return ".".join(os.path.commonprefix([path.split(".") for path in dict.fromkeys(paths)]))
