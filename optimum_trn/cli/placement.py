"""`optimum-trn placement`: who holds whose memory checkpoints, and how likely losses are survived; Gemini's figures."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from optimum_trn.checkpoint.placement import mixed_placement, recovery_bound, ring_placement
from optimum_trn.elastic.headlines import headlines

LISTED_GROUPS = 20


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("placement", help="which machines hold copies of each other's memory checkpoints")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--machines", type=int)
    what.add_argument("--published", action="store_true", help="Gemini's published figures beside ours")
    parser.add_argument("--replicas", type=int, default=2, help="copies of everything, one of them local")
    parser.add_argument("--lost", type=int, default=6, help="up to how many machines that are lost at once")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=show)


def show(options: argparse.Namespace) -> None:
    """Print the groups and the probabilities; ValueError if there are too few machines."""
    console = Console(width=160)
    if options.published:
        return _show_published(console, options.json)
    placed = mixed_placement(options.machines, options.replicas)
    ring = ring_placement(options.machines, options.replicas)
    rows = [
        {
            "lost": lost,
            "probability": placed.recovery_probability(lost),
            "bound": recovery_bound(options.machines, options.replicas, lost),
            "ring": ring.recovery_probability(lost),
        }
        for lost in range(1, min(options.lost, options.machines) + 1)
    ]
    if options.json:
        print(json.dumps({"groups": [list(group) for group in placed.groups], "recovery": rows}, indent=2))
        return
    console.print(
        f"{options.machines} machines, {options.replicas} copies of every memory checkpoint, one of them local:"
    )
    groups = [" ".join(map(str, group)) for group in placed.groups]
    for index, group in enumerate(groups):
        if index < LISTED_GROUPS - 1 or index == len(groups) - 1:
            ringed = " (a ring)" if len(placed.groups[index]) > options.replicas else ""
            console.print(f"  group {index}: machines {group}{ringed}")
        elif index == LISTED_GROUPS - 1:
            console.print(f"  ... {len(groups) - LISTED_GROUPS} more ...")
    table = Table("lost at once", "recovered from memory", "Gemini's bound", "one ring over all")
    for row in rows:
        table.add_row(str(row["lost"]), *(f"{row[key]:.4%}" for key in ("probability", "bound", "ring")))
    console.print(table)
    if options.machines % options.replicas:
        console.print("The bound is proven where the copies divide the machines; here it is a reference.")


def _show_published(console: Console, as_json: bool) -> None:
    found = headlines()
    if as_json:
        print(json.dumps([vars(headline) for headline in found], indent=2))
        return
    table = Table("figure of Gemini (SOSP 2023)", Column("published", justify="right"), "ours, computed", "assumed")
    for headline in found:
        table.add_row(headline.name, headline.published, f"{headline.ours:.1f} {headline.unit}", headline.assumed)
    console.print(table)
