"""Compiles the device's C++ once per PyTorch version and source text, and loads it.

Loading what is already built imports neither torch.utils.cpp_extension nor anything else that is slow: it happens in
every process that uses the device.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from optimum_trn.device import check_platform

NAME = "_neuron"
SOURCES = Path(__file__).with_name("csrc")
PREBUILT = Path(__file__).with_name("prebuilt")
"""Where a wheel carries the extension, in a directory named by `key()`."""

FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wno-sign-compare -Wno-unknown-pragmas "
    "-DUSE_C10D -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DAT_PER_OPERATOR_HEADERS "
    f"-DTORCH_EXTENSION_NAME={NAME}"
)
LIBRARIES = "-lc10 -ltorch_cpu -ltorch -ltorch_python"
JOBS = 2  # a compiler process takes about 1 GB

_module: ModuleType | None = None
_lock = threading.Lock()


def cache_directory() -> Path:
    """The directory of compiled extensions: $XDG_CACHE_HOME/optimum_trn, or ~/.cache/optimum_trn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimum_trn"


def key() -> str:
    """Names a build: it changes with PyTorch, Python, the architecture, the flags and every byte of the source."""
    digest = hashlib.sha256(f"{FLAGS} {LIBRARIES}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}-{digest.hexdigest()[:16]}"


def load_extension() -> ModuleType:
    """The compiled device, built first where that has not happened yet.

    Raises:
        ImportError: the platform is not Linux, there is no C++ compiler, or compiling failed.
    """
    global _module
    with _lock:
        if _module is None:
            _module = _find_or_build()
    return _module


def is_built() -> bool:
    """Whether `load_extension` would find the extension compiled."""
    return any(_is_whole(directory / key()) for directory in (PREBUILT, cache_directory()))


def _find_or_build() -> ModuleType:
    check_platform()
    name = key()
    for directory in (PREBUILT / name, cache_directory() / name):
        if _is_whole(directory) and (module := _load(directory)) is not None:
            return module
    directory = cache_directory() / name
    with _exclusive(directory):
        # Another process may have finished it while this one waited.
        if not (_is_whole(directory) and (module := _load(directory)) is not None):
            build(directory)
            module = _load(directory)
    if module is None:
        raise ImportError(f"The compiled device in {directory} cannot be loaded, although it was just built.")
    return module


def build(directory: Path) -> None:
    """Compile the extension into `directory`.

    Raises:
        ImportError: there is no compiler or no ninja, or compiling failed; the text says what to install, or shows the
            compiler's errors.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ImportError(
            "The simulated NeuronCores are compiled on first use, and there is no C++ compiler here. Install g++ 11 "
            "or newer (Debian and Ubuntu: `apt-get install g++`; Fedora and Amazon Linux: `dnf install gcc-c++`), "
            "or set CXX to another."
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "build.ninja").write_text(_ninja_file(compiler))
    print(
        f"optimum_trn: compiling the simulated NeuronCores for PyTorch {torch.__version__}; "
        "this happens once and takes about a minute.",
        file=sys.stderr,
        flush=True,
    )
    done = subprocess.run(
        [_ninja(), "-C", str(directory), "-j", str(JOBS)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise ImportError(f"Compiling the simulated NeuronCores with {compiler} failed:\n{done.stdout[-4000:]}")
    for leftover in directory.glob("*.o*"):
        leftover.unlink()
    # Written last: without it the directory counts as unfinished.
    (directory / "checksum").write_text(_checksum(directory))


def _ninja() -> str:
    if importlib.util.find_spec("ninja") is not None:  # the Python package works without its script being on PATH
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    found = shutil.which("ninja")
    if found is None:
        raise ImportError(
            "The simulated NeuronCores are compiled on first use, and ninja is missing: `pip install ninja`."
        )
    return found


def _ninja_file(compiler: str) -> str:
    root = Path(torch.__file__).parent
    libraries = root / "lib"
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = f"{FLAGS} -D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())} " + " ".join(
        f"-isystem {path}" for path in includes
    )
    lines = [
        f"rule compile\n  command = {compiler} {flags} -MMD -MF $out.d -c $in -o $out\n"
        "  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {compiler} -shared $in -L{libraries} {LIBRARIES} -Wl,-rpath,{libraries} -o $out",
    ]
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(f"{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
    lines.append(f"build {NAME}.so: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _checksum(directory: Path) -> str:
    return f"{zlib.crc32((directory / f'{NAME}.so').read_bytes()):08x}"


def _is_whole(directory: Path) -> bool:
    """Whether a build finished here and its file is what was written: loading half a library may kill the process."""
    try:
        return (directory / "checksum").read_text() == _checksum(directory)
    except OSError:
        return False


def _load(directory: Path) -> ModuleType | None:
    path = str(directory / f"{NAME}.so")
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:  # built against another library of the same version, say
        print(
            f"optimum_trn: the compiled device in {directory} cannot be loaded ({error}); building it again.",
            file=sys.stderr,
        )
        return None
    return module


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """One process builds, the others of this host wait for it; the kernel drops the lock of a process that died."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(directory.name + ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                "optimum_trn: waiting for another process that compiles the simulated NeuronCores.",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
