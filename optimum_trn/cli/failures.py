"""`optimum-trn failures`: simulates how much of its time a job makes progress on nodes that fail."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from optimum_trn.elastic import published
from optimum_trn.elastic.comparison import Row, compare, crossover
from optimum_trn.elastic.failure_clock import FailureClock, FixedClock, PoissonClock, TraceClock
from optimum_trn.elastic.policies import Bamboo, Elastic, MemoryCheckpoints, RestartFromCheckpoint, Varuna
from optimum_trn.elastic.simulator import BUCKETS, Job, Outcome, simulate

LONGER = {"1d": 86400.0, "7d": 604800.0}
"""Periods beyond those of the paper, to see where the baselines catch up."""
FEWEST, MOST = 8, 10_000


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("failures", help="simulate a job on nodes that fail, with this and other designs")
    parser.add_argument(
        "--published", choices=sorted(published.MODELS), help="Oobleck's evaluation, its published shares beside ours"
    )
    parser.add_argument("--nodes", type=int, default=128, help=f"{FEWEST} to {MOST}")
    parser.add_argument(
        "--minimum-nodes", type=int, help="of a job that goes on with fewer; half of them, if not given"
    )
    parser.add_argument("--step-seconds", type=float, default=30.0, help="on all nodes; in proportion on fewer")
    parser.add_argument("--samples", type=float, default=1024, help="of a step")
    parser.add_argument(
        "--clock", type=_clock, default=PoissonClock(6 * 3600.0), metavar="fixed:600 | poisson:3600 | trace:FILE"
    )
    parser.add_argument("--days", type=float, default=7.0, help="how long")
    parser.add_argument("--replacement-minutes", type=float, default=10.0, help="until a lost node has another")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS", help="of the baselines")
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0)
    parser.add_argument("--restart-seconds", type=float, default=300.0)
    parser.add_argument("--replicas", type=int, default=2, help="of memory checkpoints")
    parser.add_argument("--memory-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--persistent-every", type=int, default=500, metavar="STEPS", help="beside memory checkpoints")
    parser.add_argument("--retrieval-seconds", type=float, default=published.RETRIEVAL_SECONDS)
    parser.add_argument("-f", "--fault-tolerance", type=int, default=1)
    parser.add_argument("--reconfigure-seconds", type=float, default=published.RECONFIGURE_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="progress over time, as an image; needs matplotlib")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=show)


def show(options: argparse.Namespace) -> None:
    """Print tables, or JSON, and draw the plot; ValueError for numbers that make no job."""
    if options.published:
        return _show_published(options)
    job = _job(options)
    given, restart = options.checkpoint_every, lambda nodes: options.restart_seconds
    bamboo = published.bamboo("bert-large")
    assert isinstance(bamboo, Bamboo)
    memory = MemoryCheckpoints(
        options.replicas,
        options.memory_every,
        options.retrieval_seconds,
        restart,
        options.persistent_every,
        options.checkpoint_seconds,
    )
    ours = Elastic(options.fault_tolerance, options.reconfigure_seconds, memory)
    baselines = [
        lambda steps: RestartFromCheckpoint(steps, options.checkpoint_seconds, restart),
        lambda steps: Varuna(steps, options.checkpoint_seconds, restart),
        lambda steps: Bamboo(bamboo.redundancy, bamboo.failover_seconds, steps, options.checkpoint_seconds, restart),
    ]
    replacement = None if isinstance(options.clock, TraceClock) else options.replacement_minutes * 60
    run = partial(simulate, job, until=options.days * 86400, replacement_seconds=replacement, seed=options.seed)
    (row,) = compare(job, ours, baselines, given, [options.clock], run)  # type: ignore[arg-type]
    outcomes = [row.ours, run(memory, options.clock), *row.given.values()]
    if options.plot:
        _plot(outcomes, options.plot)
    if options.json:
        best = {name: {"steps": found.steps, "daly_steps": found.daly_steps, **found.outcome.as_dict()}
                for name, found in row.best.items()}  # fmt: skip
        print(json.dumps({"given": [outcome.as_dict() for outcome in outcomes], "best": best}, indent=2))
        return
    console = Console(width=160)
    console.print(
        f"Simulated, nothing measured: {job.nodes} nodes, steps of {options.step_seconds:g} s, a failure every "
        f"{options.clock.period:,.0f} s on average, {options.days:g} days."
    )
    console.print(_shares(outcomes))
    console.print(_best([row]))


def _show_published(options: argparse.Namespace) -> None:
    model = options.published
    job = published.job(model)
    clocks = {name: FixedClock(seconds) for name, seconds in {**published.PERIODS, **LONGER}.items()}
    run = partial(simulate, job, until_nodes=published.FEWEST_NODES, seed=options.seed)
    baselines = [partial(published.varuna, model), partial(published.bamboo, model)]
    given = published.VARUNA_CHECKPOINT_STEPS
    rows = compare(job, published.oobleck(model), baselines, given, clocks.values(), run)
    ten_minutes = next(row for row in rows if row.period == published.PERIODS["10m"])
    outcomes = [ten_minutes.ours, *ten_minutes.given.values()]
    if options.plot:
        _plot(outcomes, options.plot)
    if options.json:
        print(json.dumps([_as_dict(row) for row in rows], indent=2))
        return
    console = Console(width=160)
    console.print(
        f"Simulated, nothing measured: {model} on {published.MOST_NODES} nodes until {published.FEWEST_NODES} are "
        "left, constants of Oobleck's evaluation (SOSP 2023). A failure every 10 minutes:"
    )
    console.print(_shares(outcomes, published.EFFECTIVE if model == "bert-large" else {}))
    console.print(
        "Bamboo's two constants are computed from its published shares of this very run: its row is no prediction."
    )
    table = Table("a failure every", "ranking by goodput", *(outcome.policy for outcome in outcomes))
    for name, row in zip(clocks, rows, strict=True):
        cells = [
            f"{outcome.goodput:.1f}/s, {outcome.share('effective'):.1%}" for outcome in (row.ours, *row.given.values())
        ]
        table.add_row(name, " > ".join(row.ranking), *cells)
    console.print(table)
    console.print(_best(rows))
    for name in rows[0].best:
        close, ahead = crossover(rows, name)
        text = "at none of these periods" if close is None else f"from one failure in {close / 3600:g} h on"
        ahead_text = "never ahead" if ahead is None else f"ahead from {ahead / 3600:g} h on"
        console.print(f"{name} at its best interval: within 1 % of {rows[0].ours.policy} {text}; {ahead_text}.")


def _shares(outcomes: Sequence[Outcome], published_effective: dict[str, float] | None = None) -> Table:
    columns = ["published effective"] if published_effective else []
    table = Table("design", "samples/s", *BUCKETS, "failures", "went on from", *columns)
    for outcome in outcomes:
        tiers = ", ".join(f"{tier}: {count}" for tier, count in outcome.tiers.items() if count)
        cells = [f"{(published_effective or {}).get(outcome.policy, 0):.1%}"] if columns else []
        shares = [f"{outcome.share(bucket):.1%}" for bucket in BUCKETS]
        table.add_row(outcome.policy, f"{outcome.goodput:.2f}", *shares, str(outcome.failures), tiers, *cells)
    return table


def _best(rows: Sequence[Row]) -> Table:
    ours = rows[0].ours.policy
    table = Table("a failure every", "design at its best interval", "steps", "Daly's", "samples/s", f"{ours} is")
    for row in rows:
        for name, found in row.best.items():
            goodput = found.outcome.goodput
            times = f"{row.ours.goodput / goodput:.2f} times it" if goodput else "infinitely better"
            table.add_row(
                f"{row.period:,.0f} s", name, str(found.steps), str(found.daly_steps), f"{goodput:.2f}", times
            )
    return table


def _as_dict(row: Row) -> dict[str, Any]:
    best = {name: {"steps": found.steps, **found.outcome.as_dict()} for name, found in row.best.items()}
    given = [outcome.as_dict() for outcome in (row.ours, *row.given.values())]
    return {"period": row.period, "ranking": row.ranking, "given": given, "best": best}


def _job(options: argparse.Namespace) -> Job:
    if not FEWEST <= options.nodes <= MOST:
        raise ValueError(f"--nodes {options.nodes}: simulate {FEWEST} to {MOST} nodes.")
    for name in ("step_seconds", "samples", "days", "checkpoint_every", "memory_every", "persistent_every"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(options, name):g}.")
    minimum = options.minimum_nodes or (options.nodes + 1) // 2
    return Job(
        "job", options.samples, lambda nodes: options.step_seconds * options.nodes / nodes, options.nodes, minimum
    )


def _clock(text: str) -> FailureClock:
    kind, _, value = text.partition(":")
    try:
        if kind == "trace":
            return TraceClock(value)
        return {"fixed": FixedClock, "poisson": PoissonClock}[kind](float(value))
    except (KeyError, OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no clock ({error}): give fixed:SECONDS, poisson:SECONDS or trace:FILE."
        ) from None


def _plot(outcomes: Sequence[Outcome], file: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for outcome in outcomes:
        seconds, samples = zip((0.0, 0.0), *outcome.progress, strict=True)
        axes.plot([value / 3600 for value in seconds], samples, label=outcome.policy)
    axes.set(xlabel="hours (simulated)", ylabel="samples that stayed", title="Progress on nodes that fail")
    axes.legend()
    figure.savefig(file)
