"""The files of a model in the pool as files of this host, whose tensors arrive later than their headers."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.lazy import Box, LazyTensor
from ..checkpoint.slices import dtype_of, open_slices, shape_of
from ..errors import MissingError, StoreError
from .client import MAX_HEADER, Pool
from .fetch import Wanted, read
from .manifest import FileManifest


class HostFile(NamedTuple):
    """A safetensors file whose header is there: where its tensors lie, in memory that holds the file as it arrives."""

    manifest: FileManifest
    memory: mmap.mmap
    spans: dict[str, tuple[int, int]]  # of each tensor: its first byte in the file, and its bytes


class HostFiles:
    """A directory with the files of the model `name`: weights are holes in memory, all others are there.

    The directory is there until `close`, the memory as long as a tensor of it is.  Raises `MissingError` if the pool
    has no such model.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self.directory = tempfile.TemporaryDirectory(prefix="pool-")
        self.weights: dict[str, HostFile] = {}
        self.touched: list[tuple[ArrivingTensor, tuple[int, int]]] = []  # see `ArrivingTensor`
        self._descriptors: list[int] = []
        names = pool.files(f"{name}/")
        if not names:
            raise MissingError(f"There is no model {name} in the pool. Put it with `optimum-trn pool put`.")
        for file in names:
            manifest = pool.manifest(file)
            path = Path(self.directory.name, file.removeprefix(f"{name}/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith(".safetensors"):
                self.weights[file.removeprefix(f"{name}/")] = self._hole(manifest, path)
            else:
                buffer = bytearray(manifest.size)
                read(pool, [Wanted(manifest, 0, memoryview(buffer))])
                path.write_bytes(buffer)

    def _hole(self, manifest: FileManifest, path: Path) -> HostFile:
        # Memory that readers of paths can open, without the bounds that a host may have set to /dev/shm.
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, manifest.size)
        memory = mmap.mmap(descriptor, manifest.size)
        self._descriptors.append(descriptor)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        view = memoryview(memory)
        read(self.pool, [Wanted(manifest, 0, view[:8])])
        end = 8 + int.from_bytes(view[:8], "little")
        if end > min(manifest.size, MAX_HEADER):
            raise StoreError(f"{manifest.name} is no safetensors file: its header would have {end} bytes.")
        read(self.pool, [Wanted(manifest, 8, view[8:end])])
        spans = {
            name: (end + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in json.loads(bytes(view[8:end])).items()
            if name != "__metadata__"
        }
        return HostFile(manifest, memory, spans)

    def tensors(self, files: Sequence[str]) -> dict[str, ArrivingTensor]:
        """Name to tensor, over weight files of the directory."""
        found: dict[str, ArrivingTensor] = {}
        for file in files:
            host_file = self.weights[os.path.relpath(file, self.directory.name)]
            for name, source in open_slices([file]).items():
                found[name] = ArrivingTensor(self, host_file, name, source)
        return found

    def close(self) -> None:
        """Remove the directory."""
        self.directory.cleanup()
        while self._descriptors:
            os.close(self._descriptors.pop())


class ArrivingTensor(LazyTensor):
    """A tensor of a host file. Before it is `awaited` by a stream, what is read of it is fetched first, whole.

    Writing a box of it to a meta tensor only notes in `files.touched` which span of the file the box needs.
    """

    def __init__(self, files: HostFiles, file: HostFile, name: str, source: Any) -> None:
        self.files = files
        self.file = file
        self.shape = torch.Size(shape_of(source))
        self.dtype = dtype_of(source)
        self.offset, self.size_in_bytes = file.spans[name]
        self.awaited = False

    def copy_to(self, target: Tensor, box: Box) -> None:
        if target.is_meta:
            self.files.touched.append((self, self._bytes(box)))
            return
        if not self.awaited:
            read(self.files.pool, [self.wanted((self.offset, self.size_in_bytes))])
        if not self.size_in_bytes:
            return
        count = self.size_in_bytes // self.dtype.itemsize
        whole = torch.frombuffer(self.file.memory, dtype=self.dtype, count=count, offset=self.offset)
        target.copy_(whole.view(self.shape)[tuple(slice(*ends) for ends in box) if box else ...])

    def wanted(self, span: tuple[int, int]) -> Wanted:
        """What is to be fetched for a span (first byte in the file, bytes)."""
        return Wanted(self.file.manifest, span[0], memoryview(self.file.memory)[span[0] : sum(span)])

    def _bytes(self, box: Box) -> tuple[int, int]:
        """The rows of the first dimension that a box lies in: they are one span of the file."""
        if not box or not self.shape[0]:
            return self.offset, self.size_in_bytes
        row = self.size_in_bytes // self.shape[0]
        return self.offset + row * box[0][0], row * (box[0][1] - box[0][0])
