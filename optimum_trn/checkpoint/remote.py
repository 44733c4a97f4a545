"""Checkpoints at URLs that fsspec knows: each has a directory on this host, which is uploaded when it is complete.

An object store renames nothing: there a checkpoint is complete when its manifest, which is uploaded last and deleted
first, is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsspec import register_implementation
from fsspec.core import url_to_fs

from ..errors import CheckpointError
from .agreement import agreed, is_first_on_host, of_first_rank
from .manifest import FILE_NAME
from .steps import beyond_limit, step_of

# By name, since the pool is a layer above: `pool://name`, which its entry point in setup.py tells fsspec, too.
register_implementation("pool", "optimum_trn.pool.filesystem.PoolFileSystem", clobber=True)


def is_remote(location: str) -> bool:
    """Whether a location is a URL of another file system than this host's."""
    return "://" in location and not location.startswith("file://")


def local_directory(location: str) -> str:
    """The directory on this host that stands for a location: of a path or a `file://` URL it is that itself.

    For others it is one named after the URL, below OPTIMUM_TRN_OUTPUTS or else the directory for temporary files.
    """
    if location.startswith("file://"):
        return str(url_to_fs(location)[1])
    if not is_remote(location):
        return location
    root = os.environ.get("OPTIMUM_TRN_OUTPUTS") or os.path.join(tempfile.gettempdir(), f"optimum_trn-{os.getuid()}")
    key = hashlib.sha256(location.rstrip("/").encode()).hexdigest()[:16]
    return os.path.join(root, f"{key}-{location.rstrip('/').rsplit('/', 1)[-1]}")


def upload(directory: Path, url: str) -> None:
    """Copy a checkpoint to a URL, its manifest last."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    _put(sorted(files, key=lambda path: (path.name == FILE_NAME, path)), directory, url)


def upload_files(directory: Path, url: str) -> None:
    """Copy the files in a directory to a URL, not what is in directories below."""
    _put(sorted(path for path in directory.iterdir() if path.is_file()), directory, url)


def _put(files: Sequence[Path], directory: Path, url: str) -> None:
    filesystem, root = url_to_fs(url)
    for path in files:
        target = f"{root}/{path.relative_to(directory).as_posix()}"
        filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        filesystem.put_file(str(path), target)


def download(url: str, directory: Path) -> None:
    """Copy what is at a URL to a directory, which is there only when all of it is.

    Raises `CheckpointError` if there is nothing at the URL.
    """
    filesystem, root = url_to_fs(url)
    files = [file for file in filesystem.find(root) if not filesystem.isdir(file)]
    if not files:
        raise CheckpointError(f"Can't find a valid checkpoint at {url}: there is nothing.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="_download-", dir=directory.parent) as unfinished:
        for file in files:
            target = Path(unfinished, file.removeprefix(root).lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(file, str(target))
        os.replace(unfinished, directory)
        os.mkdir(unfinished)  # which is what is removed


@contextmanager
def downloaded(url: str) -> Iterator[Path]:
    """While active, what is at a URL is in a directory of each host, to which its first rank has brought it.

    All ranks must enter and leave it.  Raises as `download`, on every rank.
    """
    directory = Path(tempfile.gettempdir(), f"download-{of_first_rank(uuid.uuid4().hex)}")
    is_first = is_first_on_host()
    try:
        with agreed(f"Downloading {url}"):
            if is_first:
                download(url, directory)
        yield directory
    finally:
        with agreed(f"Reading {url}"):
            pass
        if is_first:
            shutil.rmtree(directory, ignore_errors=True)


def remote_steps(url: str) -> dict[int, str]:
    """The complete checkpoints at a URL, by their step."""
    filesystem, root = url_to_fs(url)
    if not filesystem.exists(root):
        return {}
    names = [path.rstrip("/").rsplit("/", 1)[-1] for path in filesystem.ls(root, detail=False)]
    found = {step: f"{url.rstrip('/')}/{name}" for name in names if (step := step_of(name)) is not None}
    return {step: at for step, at in found.items() if filesystem.exists(f"{url_to_fs(at)[1]}/{FILE_NAME}")}


def rotate_remote(url: str, save_total_limit: int | None, best_model_checkpoint: str | None) -> None:
    """Keep as many checkpoints as transformers keeps, and the same."""
    steps = remote_steps(url)
    for step in beyond_limit(sorted(steps), save_total_limit, step_of(Path(best_model_checkpoint or "").name)):
        filesystem, path = url_to_fs(steps[step])
        filesystem.rm_file(f"{path}/{FILE_NAME}")
        filesystem.rm(path, recursive=True)
