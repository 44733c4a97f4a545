"""`optimum-trn top`: the simulated cores that run on this host, live: memory, utilisation, step, loss."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from optimum_trn.device.core_status import CoreStatus, running_cores
from optimum_trn.hardware import GiB

WIDTH = 180  # in columns, where no terminal says


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("top", help="show the running simulated cores, live")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once, as happens where the output is no terminal")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Show the table until Ctrl-C."""
    console = Console()
    if options.once or not console.is_terminal:
        Console(width=console.width if console.is_terminal else WIDTH).print(table(running_cores()))
        return
    with Live(table(running_cores()), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(options.interval)
                live.update(table(running_cores()), refresh=True)
        except KeyboardInterrupt:
            return


def table(cores: list[CoreStatus]) -> Table:
    """One row for each core; memory, step time and utilisation are those of the simulator on this host."""
    shown = Table(title=f"{len(cores)} simulated NeuronCores are running", title_justify="left")
    for name in ("CORE", "RANK", "PID", "HBM", "PEAK", "UTIL", "STEP", "HOST S/STEP", "LOSS", "GRAPHS", "BREAKS"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("COMMAND", overflow="ellipsis", no_wrap=True)
    for core in cores:
        used = core.tensor_bytes + core.scratch_bytes
        shown.add_row(
            f"{core.instance} nc{core.core}",
            str(core.rank),
            str(core.pid),
            f"{_bar(used / max(core.limit_bytes, 1))} {used / GiB:.2f}/{core.limit_bytes / GiB:.0f} GiB",
            f"{core.peak_bytes / GiB:.2f}",
            f"{core.utilization:.0f}%",
            str(core.step),
            "" if core.step_seconds is None else f"{core.step_seconds:.3f}",
            "" if core.loss is None else f"{core.loss:.4f}",
            f"{core.graphs} ({core.cache_hits} cached)",
            str(core.graph_breaks),
            core.command,
        )
    return shown


def _bar(part: float, width: int = 8) -> str:
    full = min(width, round(part * width))
    return "█" * full + "░" * (width - full)
