"""Fetches the tests that belong to the installed accelerate: they are in its source distribution only."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from optimum_trn.device.build import cache_directory


class DownloadError(RuntimeError):
    """pip could not fetch the source distribution; the text holds what it said."""


def accelerate_version() -> str:
    """Version of the installed accelerate."""
    return importlib.metadata.version("accelerate")


def source_directory() -> Path:
    """The unpacked source distribution, downloaded into the cache on first use.

    Raises DownloadError where there is neither a copy in the cache nor a package index that has it.
    """
    name = f"accelerate-{accelerate_version()}"
    home = cache_directory() / name
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", ":all:", "--dest", scratch, f"accelerate=={accelerate_version()}"]
        # Its metadata is computed by importing setuptools, which needs nothing of this process.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPTIMUM_TRN_")}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        archives = list(Path(scratch).glob("accelerate-*.tar.gz"))
        if done.returncode != 0 or not archives:
            raise DownloadError(
                f"accelerate's tests come with its source, which pip could not download:\n{done.stdout[-2000:]}"
            )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        try:
            (Path(scratch) / name).rename(home)
        except OSError:
            if not home.is_dir():  # another process was not faster
                raise
    return home
