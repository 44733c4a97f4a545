"""`optimum-trn consolidate`: the stock directory of a training checkpoint."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("consolidate", help="write the stock directory of a training checkpoint")
    parser.add_argument("checkpoint", help="a checkpoint, or an output directory, whose newest is taken; a path or URL")
    parser.add_argument("output", help="the directory to write, which must not be there yet; a path or URL")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Consolidate, and say which checkpoint was taken; `CheckpointError` as `consolidate`."""
    from optimum_trn.checkpoint.consolidate import consolidate

    source = consolidate(options.checkpoint, options.output)
    print(f"{options.output} is the model of {source}")
