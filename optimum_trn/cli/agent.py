"""`optimum-trn agent`: the process of a node that holds memory checkpoints while workers come and go."""

from __future__ import annotations

import argparse
from typing import Any

from optimum_trn.cli.pool import bytes_of


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("agent", help="hold the memory checkpoints of a node, and copies of its peers'")
    parser.add_argument("--memory", type=bytes_of, default=8 << 30, help="how much of the host's, such as 64GiB")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this host only)")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free, which is printed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; ValueError without a token in the environment."""
    from optimum_trn.checkpoint.agents import token_of_environment
    from optimum_trn.elastic.agent import serve

    serve(
        options.memory,
        token_of_environment(),
        options.host,
        options.port,
        lambda address: print(f"agent listening on {address}", flush=True),
    )
