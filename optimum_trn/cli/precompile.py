"""`optimum-trn precompile SCRIPT ...`: runs a script to fill the compile cache, and says what it compiles and why."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimum_trn.device import device_type
from optimum_trn.device.compile_cache import cache_url


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("precompile", help="run a script to fill the compile cache, and report its graphs")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many optimizer steps (default: run it all)")
    parser.add_argument("--json", action="store_true", help="report as JSON, on the last line")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the script as `python SCRIPT ...` would, then report; ValueError where there is nothing to compile for.

    As with neuron_parallel_compile, every graph of the script ends in the cache, so that its next run compiles none.
    Under torchrun each rank does the same (`torchrun ... -m optimum_trn.cli precompile SCRIPT`).
    """
    if device_type() != "neuron":
        raise ValueError("OPTIMUM_TRN_DEVICE=cpu has no graphs to compile; leave it out.")
    if not Path(options.script).is_file():
        raise ValueError(f"{options.script} is no file: name the script that is to be run.")
    from optimum_trn.device import runtime
    from optimum_trn.device.step_graphs import step_graphs

    runtime.init()
    graphs = step_graphs()
    assert graphs is not None, "the core is chosen"
    if options.steps:

        def stop() -> None:
            if graphs.steps >= options.steps:
                sys.exit(0)

        graphs.on_step.append(stop)
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    code: Any = 0
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    graphs.mark_step()
    failed = 0 if code in (None, 0) else 1
    if options.json:
        breaks = [
            {
                "line": str(entry.line),
                "text": entry.line.text,
                "kind": entry.kind,
                "reads": entry.reads,
                "cuts": entry.cuts,
            }
            for entry in graphs.breaks.values()
        ]
        print(json.dumps({"compilations": [asdict(c) for c in graphs.compilations], "graph_breaks": breaks}))
    else:
        print(graphs.summary())
        print(f"cache: {cache_url() or 'none (--no_cache)'}")
        print(f"Total graphs: {graphs.graphs}")
        print(f"Total successful compilations (simulated): {graphs.graphs - graphs.cache_hits}")
        print("Total failed compilations: 0")
    if failed:
        sys.exit(code)
