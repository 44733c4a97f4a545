"""`optimum-trn pool`: serves a pool of host memory, and puts, lists and removes the models in it."""

from __future__ import annotations

import argparse
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

from optimum_trn.errors import StoreError

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("pool", help="keep models in host memory and stream them to NeuronCores")
    actions = parser.add_subparsers(dest="action", required=True)

    serve = actions.add_parser("serve", help="run the stores of a pool until Ctrl-C")
    serve.add_argument("--stores", type=int, default=1, help="how many processes")
    serve.add_argument("--memory", type=bytes_of, default=4 << 30, help="of each store, such as 4GiB")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this host only)")
    serve.add_argument("--spill", type=Path, help="a directory for what does not fit the memory")
    serve.add_argument("--cores", type=int, default=0, help="NeuronCores that are lent (see docs/pool.md)")
    serve.add_argument("--rate", type=bytes_of, help="emulate links of so many bytes per second, such as 25MB")
    serve.set_defaults(run=run_serve)

    put = actions.add_parser("put", help="put a saved model, or one of the Hub")
    put.add_argument("source", help="a directory, or a Hub id")
    put.add_argument("--name", help="its name in the pool (default: that of the directory, or the Hub id)")
    put.add_argument("--strategy", default="hybrid", help="application, horizontal, vertical or hybrid")
    put.add_argument("--replicas", type=int, default=1, help="stores that hold each piece")
    put.set_defaults(run=run_put)

    actions.add_parser("ls", help="list the models, and the stores").set_defaults(run=run_ls)

    remove = actions.add_parser("rm", help="remove a model")
    remove.add_argument("name")
    remove.set_defaults(run=run_rm)


def bytes_of(text: str) -> int:
    """A size such as "4GiB" or "25MB" in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match.group(2) not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 4GiB or 25MB")
    return int(float(match.group(1)) * UNITS[match.group(2)])


def run_serve(options: argparse.Namespace) -> None:
    """Run the stores until Ctrl-C or SIGTERM, or until one of them ends."""
    from optimum_trn.pool.address import default_path
    from optimum_trn.pool.serve import PoolProcesses
    from optimum_trn.store.frames import is_loopback

    if not is_loopback(options.host):
        print(f"{options.host} can be reached from other hosts: who has the token may read and write, and what is sent")
        print("is not encrypted. Let only a private network through to it.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = default_path()
    with PoolProcesses(
        options.stores, options.memory, options.host, options.spill, options.rate, options.cores
    ) as processes:
        processes.address.save(path)
        places = ", ".join(f"{host}:{port}" for host, port in processes.address.stores)
        print(f"{options.stores} stores of {options.memory} bytes at {places}; their address is in {path}", flush=True)
        try:
            processes.wait()
        except KeyboardInterrupt:
            return
        finally:
            path.unlink(missing_ok=True)
        raise StoreError("A process of the pool has ended; the others are stopped.")


def run_put(options: argparse.Namespace) -> None:
    """Put a directory or a Hub id; `StoreError` if it is neither."""
    from optimum_trn.pool import Pool, put_directory, put_from_hub

    with Pool() as pool:
        local = Path(options.source).is_dir()
        name = options.name or (Path(options.source).resolve().name if local else options.source)
        source = put_directory if local else put_from_hub
        files = source(pool, options.source, name, options.strategy, options.replicas)
        size = sum(file.size for file in files)
        print(f"pool://{name}: {len(files)} files, {size} bytes, {options.strategy}, {options.replicas} copies")


def run_ls(options: argparse.Namespace) -> None:
    """List models with their files and bytes, then the stores."""
    from optimum_trn.pool import Pool

    with Pool() as pool:
        models: dict[str, list[int]] = defaultdict(list)
        for file in pool.files():
            models[file.rpartition("/")[0]].append(pool.manifest(file).size)
        for name, sizes in sorted(models.items()):
            print(f"pool://{name}  {len(sizes)} files  {sum(sizes)} bytes")
        for (host, port), said in zip(pool.address.stores, pool.statistics(), strict=True):
            text = said if isinstance(said, str) else "  ".join(f"{key} {value}" for key, value in said.items())
            print(f"store {host}:{port}  {text}")


def run_rm(options: argparse.Namespace) -> None:
    """Remove a model, or a file; `StoreError` if there is none of this name."""
    from optimum_trn.pool import Pool

    with Pool() as pool:
        below = pool.files(f"{options.name}/")
        for file in below or [options.name]:
            pool.remove(file)
        print(f"pool://{options.name} is removed")
