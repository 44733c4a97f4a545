"""`optimum-trn cache list|show|clean`: the compiled graphs that runs on this host, or a bucket, have left."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from optimum_trn.device.compile_cache import CompileCache, cache_url


def add_to(commands: Any) -> None:
    """Adds the command and its three actions to the subparsers of the command line."""
    parser = commands.add_parser("cache", help="list, show or remove compiled graphs")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, action, text in (
        ("list", show_all, "list the graphs in the cache"),
        ("show", show_one, "show one graph: its size, and why it was compiled"),
        ("clean", clean, "remove the graphs of the simulator, and nothing else"),
    ):
        entry = actions.add_parser(name, help=text)
        entry.add_argument("--url", help="path or URL of the cache (default: that of NEURON_COMPILE_CACHE_URL)")
        if name == "show":
            entry.add_argument("module", help="MODULE_..., or the beginning of it")
        if name != "clean":
            entry.add_argument("--json", action="store_true")
        entry.set_defaults(run=action)


def _cache(options: argparse.Namespace) -> CompileCache:
    url = options.url or cache_url()
    if url is None:
        raise ValueError("NEURON_CC_FLAGS has --no_cache: there is no cache. Name one with --url.")
    return CompileCache(url)


def show_all(options: argparse.Namespace) -> None:
    """Print a table, or JSON."""
    cache = _cache(options)
    graphs = cache.graphs()
    if options.json:
        print(json.dumps([asdict(graph) for graph in graphs], indent=1))
        return
    total = sum(graph.seconds for graph in graphs)
    title = f"{cache.url}: {len(graphs)} graphs, estimated to compile in {total:.0f} s"
    shown = Table("MODULE", "OPERATIONS", "SECONDS (ESTIMATED)", "SCRIPT", "CREATED", title=title)
    for graph in graphs:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(graph.created))
        shown.add_row(graph.module, str(graph.operations), f"{graph.seconds:.0f}", graph.script, created)
    Console().print(shown)


def show_one(options: argparse.Namespace) -> None:
    """Print what is known of one graph; ValueError where none, or several, have that name."""
    cache = _cache(options)
    found = [graph for graph in cache.graphs() if graph.module.startswith(options.module)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} graphs in {cache.url} have a name that begins with {options.module!r}.")
    if options.json:
        print(json.dumps(asdict(found[0]), indent=1))
        return
    for name, value in asdict(found[0]).items():
        print(f"{name:12} {value}")


def clean(options: argparse.Namespace) -> None:
    """Remove, and say how many."""
    cache = _cache(options)
    print(f"{cache.clean()} graphs removed from {cache.url}")
