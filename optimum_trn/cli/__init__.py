"""The command line: `optimum-trn <command>`, one module for each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from optimum_trn.cli import (
    agent,
    cache,
    consolidate,
    env,
    failures,
    launch,
    ls,
    models,
    monitor,
    placement,
    plan,
    pool,
    precompile,
    top,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` (those of the process, if None) name."""
    parser = argparse.ArgumentParser(prog="optimum-trn", description="Hugging Face training for AWS Trainium.")
    commands = parser.add_subparsers(dest="command", required=True)
    env.add_to(commands)
    consolidate.add_to(commands)
    plan.add_to(commands)
    launch.add_to(commands)
    placement.add_to(commands)
    failures.add_to(commands)
    agent.add_to(commands)
    pool.add_to(commands)
    models.add_to(commands)
    cache.add_to(commands)
    precompile.add_to(commands)
    ls.add_to(commands)
    top.add_to(commands)
    monitor.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:  # a user's mistake: its text says what to do, a traceback would hide it
        parser.exit(2, f"optimum-trn {options.command}: {error}\n")
