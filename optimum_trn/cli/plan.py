"""`optimum-trn plan`: the best layouts of a model on a cluster, how long a step takes and what it costs."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from optimum_trn.cost import MACHINES
from optimum_trn.errors import PlanError
from optimum_trn.planning.memory import host_bytes
from optimum_trn.planning.pictures import LAYOUT_COLUMNS, STATUS, engine_slices, layout_row, report
from optimum_trn.planning.planner import Plan, compare, plan
from optimum_trn.planning.search import training_arguments
from optimum_trn.report import chrome_trace
from optimum_trn.report import render as page

WIDTH = 160
"""Columns of what is not a terminal."""

LISTED = 40
"""Layouts in the table of a report, which has a filter."""

MULTIPLES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("plan", help="find the best layout of a model on a cluster, with its time and cost")
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", help="a model id, its directory, or a config.json")
    parser.add_argument("--instance", default="trn1.32xlarge", choices=sorted(MACHINES))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--seq-len", type=int, required=True, metavar="TOKENS")
    parser.add_argument("--global-batch", type=int, required=True, metavar="SEQUENCES")
    parser.add_argument("--layout", type=_layout, metavar="tp=8,dp=64", help="keep to layouts with these degrees")
    parser.add_argument("--precision", default="autocast", choices=("autocast", "bf16_sr", "fp32"))
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "lamb"))
    parser.add_argument("--flash-attention", action="store_true", default=None, help="scores in tiles (GPUs: always)")
    parser.add_argument("--tokens", type=number, metavar="2T", help="of the whole run, for days and dollars")
    parser.add_argument("--budget", type=number, metavar="DOLLARS")
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of an instance an hour, instead of the list's")
    parser.add_argument("--compare", choices=sorted(MACHINES), help="the same training on as many of these")
    parser.add_argument("--top", type=int, default=5, help="how many layouts to list")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, metavar="OUT.html", help="a page with pictures of the plan")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="engines of each stage's core, for Perfetto")
    parser.set_defaults(run=show)


def show(options: argparse.Namespace) -> None:
    """Print the plan; ValueError where nothing fits or the model can't be planned."""
    for path in (options.report, options.trace):
        if path is not None and not path.parent.is_dir():
            raise PlanError(f"{path}: there is no directory {path.parent}. Create it, or name another file.")
    console = Console(stderr=options.json)
    with console.status("Searching layouts ...") if console.is_terminal else nullcontext():
        found = _plan(options)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        render(found, console if console.is_terminal else Console(width=WIDTH), options.top)
    _pictures(found, options)


def _pictures(found: Plan, options: argparse.Namespace) -> None:
    """Write what `--report` and `--trace` ask for."""
    if options.report is not None:
        options.report.write_text(page(report(found)), encoding="utf-8")
    if options.trace is not None:
        options.trace.write_text(chrome_trace(engine_slices(found), STATUS), encoding="utf-8")


def _plan(options: argparse.Namespace) -> Plan:
    shown = max(options.top, 1)
    return plan(
        options.model,
        instance=options.instance,
        nodes=options.nodes,
        sequence_length=options.seq_len,
        global_batch=options.global_batch,
        layout=options.layout,
        precision=options.precision,
        optimizer=options.optimizer,
        flash_attention=options.flash_attention,
        tokens=options.tokens,
        budget=options.budget,
        dollars_per_hour=options.price,
        compare_with=options.compare,
        keep=max(shown, LISTED) if options.report else shown,
    )


def render(found: Plan, console: Console, top: int | None = None) -> None:
    """The plan as text."""
    work, chosen = found.workload, found.chosen
    console.print(
        f"{work.architecture.model_type}, {work.architecture.parameters / 1e9:.2f}B parameters, on {work.nodes} x "
        f"{work.machine.name} ({work.world_size} ranks), {work.global_batch} x {work.sequence_length} tokens "
        f"a step, {work.precision}, {work.optimizer}. Predicted by a cost model, not measured."
    )
    table = Table(Column(LAYOUT_COLUMNS[0], no_wrap=True), *LAYOUT_COLUMNS[1:])
    best = found.result.best if top is None else found.result.best[:top]
    rows = best if chosen in best else [*best, chosen]
    for candidate in rows:
        table.add_row(*layout_row(found, candidate))
    console.print(table)
    step, memory = chosen.step, chosen.memory
    console.print(f"Layout: {chosen.layout}; micro-batches a step: {chosen.layout.micro_batches(work)}")
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    console.print("Step: " + ", ".join(f"{name} {value:.3g} s" for name, value in parts if value > 5e-4 * step.seconds))
    sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.categories.items() if size)
    console.print(f"HBM of the fullest core, GiB of {memory.capacity / 2**30:g}: {sizes}")
    if chosen.layout.parallel.optimizer_offload:
        console.print(
            f"Optimizer states in the memory of each host: {host_bytes(work, chosen.layout) / 2**30:.1f} GiB. The time "
            "of a step leaves out what they take: no rate between host and chips is published."
        )
    _cost(found, console)
    others = "; ".join(f"{count} {reason}" for reason, count in found.result.reasons.most_common(6))
    console.print(f"Of {found.result.tried} layouts, the others fell: {others or 'none did'}")
    arguments = ", ".join(f"{name}={value!r}" for name, value in training_arguments(work, chosen.layout).items())
    console.print(f"NeuronTrainingArguments({arguments})", markup=False, highlight=False)
    if found.comparison is not None:
        _comparison(found, console)


def _cost(found: Plan, console: Console) -> None:
    if found.price is None:
        console.print("No price of this instance is published: give one with --price.")
    else:
        console.print(f"Price: {found.price}", markup=False)
    hours, dollars = found.hours(found.chosen), found.dollars(found.chosen)
    if hours is None or found.tokens is None:
        return
    cost = "" if dollars is None else f", {dollars:,.0f} dollars"
    console.print(f"{found.tokens:,.0f} tokens: {hours / 24:,.1f} days{cost}")
    if dollars is not None and found.budget is not None:
        affordable = found.tokens * found.budget / dollars
        over = f"over by {dollars / found.budget - 1:.0%}: it pays for {affordable:,.0f} tokens"
        console.print(f"Budget of {found.budget:,.0f} dollars: {'kept' if dollars <= found.budget else over}")


def _comparison(found: Plan, console: Console) -> None:
    other, ratios = found.comparison, compare(found)
    assert other is not None
    console.print(f"\nCompared with {other.workload.nodes} x {other.workload.machine.name}, at its own best layout:")
    console.print(f"  {other.chosen.layout}: step {other.chosen.step.seconds:.3f} s, MFU {other.chosen.step.mfu:.1%}")
    console.print(f"  Price: {other.price}", markup=False)
    console.print(f"  predicted speed: {ratios['speed_ratio']:.3f} times that of {other.workload.machine.name}")
    if ratios["saving"] is not None:
        console.print(
            f"  predicted saving: {ratios['saving']:.1%}; at equal speed the prices alone save "
            f"{ratios['saving_at_equal_speed']:.1%}"
        )


def number(text: str) -> float:
    """A number with K, M, B or T behind it."""
    match = re.fullmatch(r"([0-9.]+)([KMBT]?)", text.strip().upper().lstrip("$"))
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 300B or 2T.")
    return float(match[1]) * MULTIPLES[match[2]]


def _layout(text: str) -> dict[str, Any]:
    """`tp=8,dp=64,sp` as a mapping; a name alone is True."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        words = {"": True, "true": True, "false": False, "none": None}
        if value.lower() in words:
            found[key] = words[value.lower()]
        elif value.isdecimal():
            found[key] = int(value)
        else:
            found[key] = float(value) if re.fullmatch(r"[0-9]*\.[0-9]+", value) else value
    return found
