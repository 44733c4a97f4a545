"""`optimum-trn launch`: a training script on several nodes, of which some may be lost while it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("launch", help="run a script on nodes of which some may be lost while it runs")
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes; all of them are started on this host")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="processes, one a NeuronCore, of each node")
    parser.add_argument(
        "-f", "--fault-tolerance", type=int, default=None, help="how many nodes may be lost at the same time"
    )
    parser.add_argument("--max-restarts", type=int, default=0, help="how many lost nodes are started again")
    parser.add_argument("--directory", default="elastic", help="for the journal and the output of every process")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the script until its nodes have finished; the exit code is 1 if none did."""
    from optimum_trn.elastic.controller import Controller

    for name in ("nodes", "nproc_per_node"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}.")
    controller = Controller(
        [sys.executable, options.script, *options.arguments],
        options.nodes,
        options.nproc_per_node,
        options.fault_tolerance,
        options.directory,
        options.max_restarts,
    )
    print(f"The journal is {controller.journal.path}, the output of the processes is beside it.", flush=True)
    raise SystemExit(controller.run())
