"""The pool as a file system of fsspec: `pool://name/file`."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ..errors import MissingError
from .client import Pool
from .fetch import Wanted, read

WRITE_BLOCK = 16 << 20


class PoolFileSystem(AbstractFileSystem):
    """Files in the pool of OPTIMUM_TRN_POOL, or of the file `address`; directories are what their names begin with."""

    protocol = "pool"
    root_marker = ""
    cachable = False  # pools come and go at the same place

    def __init__(self, pool: Pool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.pool = pool or Pool()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """The files and directories in a directory, or the file of this name."""
        path = self._strip_protocol(path).strip("/")
        prefix = f"{path}/" if path else ""
        names = self.pool.files(prefix)
        entries: dict[str, dict[str, Any]] = {}
        for name in names:
            first, slash, _ = name[len(prefix) :].partition("/")
            full = prefix + first
            entries[full] = {"name": full, "size": 0, "type": "directory"} if slash else self._entry(full)
        if not entries:
            entries = {path: self._entry(path)}
        return list(entries.values()) if detail else sorted(entries)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Type and size of a file or directory; FileNotFoundError if it is not there."""
        path = self._strip_protocol(path).strip("/")
        if not path or self.pool.files(f"{path}/"):
            return {"name": path, "size": 0, "type": "directory"}
        return self._entry(path)

    def _entry(self, path: str) -> dict[str, Any]:
        try:
            return {"name": path, "size": self.pool.manifest(path).size, "type": "file"}
        except MissingError as error:
            raise FileNotFoundError(str(error)) from error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: directories are there with their files."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Nothing, as `makedirs`."""

    def rm_file(self, path: str) -> None:
        """Remove a file; FileNotFoundError if it is not there."""
        try:
            self.pool.remove(self._strip_protocol(path))
        except MissingError as error:
            raise FileNotFoundError(str(error)) from error

    def rmdir(self, path: str) -> None:
        """Nothing, as `makedirs`."""

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or all that is below directories."""
        for one in [path] if isinstance(path, str) else path:
            if self.isdir(one) and recursive:
                for file in self.find(one):
                    self.rm_file(file)
            else:
                self.rm_file(one)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **options: Any) -> None:
        """Put a local file."""
        if not os.path.isdir(lpath):
            self.pool.put(lpath, self._strip_protocol(rpath))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """The bytes of a file, or a range of them."""
        try:
            manifest = self.pool.manifest(self._strip_protocol(path))
        except MissingError as error:
            raise FileNotFoundError(str(error)) from error
        first, last, _ = slice(start, end).indices(manifest.size)
        buffer = bytearray(max(0, last - first))
        read(self.pool, [Wanted(manifest, first, memoryview(buffer))])
        return bytes(buffer)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **options: Any,
    ) -> Any:
        if mode == "rb":
            return PoolFile(self, path, mode, cache_options=cache_options, size=self.info(path)["size"])
        if mode != "wb":
            raise ValueError(f"A file in the pool is read whole or written anew, not opened with {mode!r}.")
        return PoolFile(self, path, mode, block_size=WRITE_BLOCK)


class PoolFile(AbstractBufferedFile):
    """An open file: read in ranges; what is written is in the pool when the file is closed."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))

    def _initiate_upload(self) -> None:
        self._unfinished = tempfile.NamedTemporaryFile(prefix="pool-", suffix=os.path.splitext(self.path)[1])

    def _upload_chunk(self, final: bool = False) -> bool:
        self._unfinished.write(self.buffer.getbuffer())
        if final:
            self._unfinished.flush()
            self.fs.put_file(self._unfinished.name, self.path)
            self._unfinished.close()
        return True

    def discard(self) -> None:
        """Forget what was written."""
        self._unfinished.close()
