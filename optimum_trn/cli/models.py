"""`optimum-trn models`: the model families that can be sharded, by their names in transformers."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("models", help="list the model families that can be sharded")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print one model type a line."""
    from optimum_trn.patching import supported_models

    found = sorted(supported_models())
    print(json.dumps(found) if options.json else "\n".join(found))
