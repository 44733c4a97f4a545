"""The cache of compiled graphs, laid out like Neuron's: <root>/neuronxcc-<version>/MODULE_<graph>+<flags>/.

Layout, variables and the hash of the flags are those of Neuron's cache (github.com/aws-neuron/aws-neuron-sdk,
about-neuron/arch/neuron-features/neuron-caching.rst, 2026-08-21). What lies in a module's directory is not a program
but what the simulator knows of it, so the version says `simulated` and a real compiler never takes it for its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsspec

DEFAULT_ROOT = "/var/tmp/neuron-compile-cache"
DONE, GRAPH, FLAGS = "model.done", "graph.json", "compile_flags.json"
FIXED_SECONDS, SECONDS_AN_OPERATION = 7.0, 0.2


def estimated_seconds(operations: int) -> float:
    """How long the real compiler would take for a graph: an estimate, a straight line through two published times.

    9.97 s for two linear layers, of about 15 operations (archive/nxd-training/pytorch-neuron-debug.rst), and about 40
    minutes for the few graphs of a BERT-Large training step one after the other, of about 12,000 operations in all
    (archive/nxd-training/bert.rst); both in github.com/aws-neuron/aws-neuron-sdk, 2026-08-21.
    """
    return FIXED_SECONDS + SECONDS_AN_OPERATION * operations


def compiler_version() -> str:
    """Part of every key: the recorder's view of a graph may change with the package."""
    return f"{version('optimum_trn')}+simulated"


def compiler_flags() -> list[str]:
    """NEURON_CC_FLAGS without those that are about the cache itself."""
    kept, flags = [], iter(shlex.split(os.environ.get("NEURON_CC_FLAGS", "")))
    for flag in flags:
        if flag == "--cache_dir":
            next(flags, None)
        elif flag not in ("--no_cache", "--retry_failed_compilation") and not flag.startswith("--cache_dir="):
            kept.append(flag)
    return kept


def cache_url() -> str | None:
    """Where compiled graphs are kept; None with --no_cache. --cache_dir wins over NEURON_COMPILE_CACHE_URL."""
    flags = shlex.split(os.environ.get("NEURON_CC_FLAGS", ""))
    if "--no_cache" in flags:
        return None
    for place, flag in enumerate(flags):
        if flag.startswith("--cache_dir="):
            return flag.partition("=")[2]
        if flag == "--cache_dir" and place + 1 < len(flags):
            return flags[place + 1]
    return os.environ.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_ROOT


def module_name(content: bytes, target: str) -> str:
    """MODULE_<hash of the graph>+<hash of the flags>: of its content only, the same in every process.

    `target` is the chip that is compiled for, a flag as for the real compiler.
    """
    graph = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    flags = json.dumps([f"--target={target}", *compiler_flags()])
    return f"MODULE_{graph:020d}+{hashlib.md5(flags.encode(), usedforsecurity=False).hexdigest()[:8]}"


@dataclass(frozen=True)
class CachedGraph:
    """One entry: estimated `seconds` of its compilation, and why it was compiled, at which `step` of `script`."""

    module: str
    operations: int
    seconds: float
    step: int
    cause: str
    script: str
    created: float
    version: str = ""


class CompileCache:
    """Compiled graphs below `url`, a local path or whatever fsspec opens (s3://bucket/prefix).

    Raises ValueError for a URL that fsspec can't open.
    """

    def __init__(self, url: str):
        self.url = url
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"The compile cache {url!r} (NEURON_COMPILE_CACHE_URL or --cache_dir in NEURON_CC_FLAGS) can't be "
                f"opened: {error}. Name a directory, a URL whose fsspec package is installed, or set --no_cache."
            ) from error
        self.is_local = isinstance(self.files, fsspec.get_filesystem_class("file"))
        self.directory = f"{self.root.rstrip('/')}/neuronxcc-{compiler_version()}"

    def __contains__(self, module: str) -> bool:
        return bool(self.files.exists(f"{self.directory}/{module}/{DONE}"))

    def add(self, graph: CachedGraph) -> bool:
        """Keep a graph; False if another process did in the meantime, whose entry stays."""
        contents = {
            FLAGS: json.dumps(compiler_flags()),
            GRAPH: json.dumps(asdict(graph), indent=1),
            DONE: "",  # last: an entry without it isn't there
        }
        if not self.is_local:
            if graph.module in self:
                return False
            for name, text in contents.items():
                self.files.pipe_file(f"{self.directory}/{graph.module}/{name}", text.encode())
            return True
        with self._locked():
            if graph.module in self:
                return False
            place = Path(self.directory, graph.module)
            shutil.rmtree(place, ignore_errors=True)  # half an entry, of a process that died
            unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.directory))
            for name, text in contents.items():
                (unfinished / name).write_text(text)
            unfinished.chmod(0o755)
            unfinished.rename(place)
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process of this host writes at a time; the kernel drops the lock of one that died."""
        os.makedirs(self.directory, exist_ok=True)
        with open(Path(self.directory, ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def graphs(self) -> list[CachedGraph]:
        """Everything that simulated compilers of any version have put there, oldest first."""
        found = []
        for done in self.files.glob(f"{self.root.rstrip('/')}/neuronxcc-*+simulated/MODULE_*/{DONE}"):
            place = done.rpartition("/")[0]
            entry: dict[str, Any] = json.loads(self.files.cat_file(f"{place}/{GRAPH}"))
            compiler = place.split("/")[-2].removeprefix("neuronxcc-")
            found.append(CachedGraph(**{**entry, "version": compiler}))
        return sorted(found, key=lambda graph: graph.created)

    def clean(self) -> int:
        """Remove what simulated compilers have put there, and nothing else; how many graphs that were."""
        count = len(self.graphs())
        for directory in self.files.glob(f"{self.root.rstrip('/')}/neuronxcc-*+simulated"):
            self.files.rm(directory, recursive=True)
        return count
