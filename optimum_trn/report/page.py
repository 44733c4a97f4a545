"""One self-contained page of a plan or a run: charts as SVG, a table with a filter, and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from optimum_trn.report import charts

GIB = 2**30

SHOWN = 600
"""Spans of a pipeline's rank that are drawn; a step of more micro-batches repeats what was drawn."""


@dataclass(frozen=True)
class Memory:
    """HBM of one core over a step: bytes by category at each of `times`, and what the core has.

    `times` are in `unit`: seconds, or events of the stream where nothing says how long they take.
    """

    core: str
    times: Sequence[float]
    categories: Mapping[str, Sequence[float]]
    capacity: float
    unit: str = "s"


@dataclass(frozen=True)
class Span:
    """What a rank of a pipeline does from `start` to `end`, in seconds of the step."""

    start: float
    end: float
    kind: str
    label: str


@dataclass(frozen=True)
class Compilation:
    """A graph that was compiled, or would be: when (its step), how long that takes, and why."""

    step: int
    graph: str
    seconds: float
    cached: bool
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows under columns; `marked` is the place of the row that the page is about."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclass(frozen=True)
class Curve:
    """Values of several series at each of `xs`, in `unit`."""

    x_label: str
    xs: Sequence[float]
    series: Mapping[str, Sequence[float]]
    unit: str


@dataclass(frozen=True)
class Report:
    """What a page shows; parts that are empty are left out. `status` says where the numbers come from."""

    title: str
    status: str
    facts: Mapping[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    step: Mapping[str, float] = field(default_factory=dict)
    pipeline: Sequence[Sequence[Span]] = ()
    compilations: Sequence[Compilation] = ()
    layouts: Table | None = None
    scaling: Curve | None = None
    arguments: str = ""


def render(report: Report) -> str:
    """The page as HTML."""
    sections = [
        _section("summary", "Summary", _facts(report.facts)) if report.facts else "",
        _section("hbm", "HBM over a step", _memory(report.memory)) if report.memory else "",
        _section("step", "What a step takes", charts.bars(report.step, "s")) if report.step else "",
        _section("pipeline", "Pipeline", _pipeline(report.pipeline)) if report.pipeline else "",
        _section("compilations", "Compilations", _compilations(report.compilations)) if report.compilations else "",
        _section("layouts", "Layouts", _layouts(report.layouts)) if report.layouts else "",
        _section("scaling", "Scaling", _scaling(report.scaling)) if report.scaling else "",
        _section("arguments", "Arguments", f"<pre>{escape(report.arguments)}</pre>") if report.arguments else "",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{escape(report.title)}</h1><p class="status">{escape(report.status)}</p>'
        f"{''.join(sections)}<script>{SCRIPT}</script></body></html>\n"
    )


def as_json(report: Report) -> str:
    """The same data for machines."""

    def plain(value: Any) -> Any:
        return vars(value) if hasattr(value, "__dataclass_fields__") else str(value)

    return json.dumps(report, default=plain, indent=2)


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>'


def _facts(facts: Mapping[str, str]) -> str:
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{''.join(cells)}</dl>"


def _memory(memory: Memory) -> str:
    series = {name: [value / GIB for value in values] for name, values in memory.categories.items()}
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    best = max(range(len(totals)), key=totals.__getitem__)
    held = sorted(((values[best], name) for name, values in series.items() if values[best]), reverse=True)
    holders = ", ".join(f"{name} {size:.3g}" for size, name in held)
    chart = charts.stacked_areas(memory.times, series, "GiB", f"{memory.core}, {memory.unit}", memory.capacity / GIB)
    peak = f"Peak {totals[best]:.3g} of {memory.capacity / GIB:.4g} GiB at {memory.times[best]:.3g} {memory.unit}"
    return f"<p>{escape(f'{peak}: {holders} GiB.')}</p>{chart}"


def _pipeline(ranks: Sequence[Sequence[Span]]) -> str:
    kinds = list(dict.fromkeys(span.kind for spans in ranks for span in spans))
    rows = {
        f"stage {rank}": [(s.start, s.end, s.kind, f"{s.label}: {s.start:.4g} to {s.end:.4g} s") for s in spans[:SHOWN]]
        for rank, spans in enumerate(ranks)
    }
    return charts.span_rows(rows, kinds, "seconds")


def _compilations(events: Sequence[Compilation]) -> str:
    columns = ("step", "graph", "compile time", "cache", "why")
    rows = [(str(e.step), e.graph, f"{e.seconds:,.0f} s", "hit" if e.cached else "compiled", e.reason) for e in events]
    return _table(Table(columns, rows), "")


def _layouts(table: Table) -> str:
    box = '<input id="filter" type="search" placeholder="filter: tp=8 zero-1 ..." aria-label="filter">'
    return f'{box} <span id="count">{len(table.rows)} layouts</span>{_table(table, "layout-table")}'


def _scaling(curve: Curve) -> str:
    return charts.curves(curve.xs, curve.series, curve.unit, curve.x_label)


def _table(table: Table, name: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = (
        ('<tr class="marked">' if place == table.marked else "<tr>")
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table id="{name}">{body}</table></div>'


STYLE = """
:root{color-scheme:light dark;--line:#8886;--soft:#8882}
body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.15em;margin:1.6em 0 .4em}
.status{border-left:4px solid #ee6677;padding:.3em .8em;background:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:.6em}
dl div{background:var(--soft);padding:.4em .7em;border-radius:4px}
dt{font-size:.85em;opacity:.75}dd{margin:0;font-weight:600}
svg{width:100%;height:auto}svg text{font-size:12px;fill:currentColor}
.axis,.grid{stroke:var(--line)}.grid{stroke-dasharray:2 4}.limit{stroke:#ee6677;stroke-width:2;stroke-dasharray:6 4}
.peak{fill:none;stroke:currentColor;stroke-width:2}.span{stroke:#fff6;stroke-width:.3}
.legend{margin:.2em 0}.key{margin-right:1em;white-space:nowrap}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9em}
td,th{padding:.25em .7em;text-align:left;white-space:nowrap}
th{cursor:pointer}tbody tr:nth-child(odd){background:var(--soft)}.marked{outline:2px solid #4477aa}
pre{background:var(--soft);padding:.7em;white-space:pre-wrap}
"""

SCRIPT = """
const box=document.getElementById('filter'),table=document.getElementById('layout-table');
if(box){const rows=[...table.tBodies[0].rows],count=document.getElementById('count');
box.addEventListener('input',()=>{const words=box.value.toLowerCase().split(/\\s+/);let shown=0;
for(const row of rows){row.hidden=!words.every(word=>row.textContent.toLowerCase().includes(word));shown+=!row.hidden}
count.textContent=shown+' layouts'});
[...table.tHead.rows[0].cells].forEach((cell,column)=>cell.addEventListener('click',()=>{
const down=cell.dataset.down=cell.dataset.down==='1'?'0':'1',value=row=>{const text=row.cells[column].textContent;
const number=parseFloat(text.replace(/[,+]/g,''));return isNaN(number)?text:number};
rows.sort((a,b)=>(value(a)>value(b)?1:-1)*(down==='1'?1:-1)).forEach(row=>table.tBodies[0].append(row))}))}
"""
