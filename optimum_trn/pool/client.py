"""The client of a pool: puts files on its stores, lists, removes and reads them, though a store may be gone."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from ..errors import MissingError, StoreError
from ..store.client import StoreClient
from ..store.protocol import check_name, checksum_of_bytes
from .address import PoolAddress
from .manifest import FileManifest, Piece, manifest_name, pieces_prefix
from .placement import cut, layer_runs

T = TypeVar("T")

MAX_HEADER = 100 << 20  # of a safetensors file, as its own reader bounds it


class Pool:
    """The stores of one pool, each over a connection of its own for each thread.

    Methods raise `StoreError` (`MissingError`) for what the stores refuse (do not have), and for stores that cannot be
    reached if no other has what is asked for.
    """

    def __init__(self, address: PoolAddress | None = None, timeout: float = 60.0) -> None:
        """By default that of `PoolAddress.load()`."""
        self.address = address or PoolAddress.load()
        self.timeout = timeout
        self.lost: dict[int, str] = {}  # stores that could not be reached, and why
        self._local = threading.local()
        self._clients: list[StoreClient] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        for client in self._clients:
            client.close()
        self._clients = []
        self._local = threading.local()

    def leave_thread(self) -> None:
        """End the connections of this thread, which is about to end."""
        clients: dict[int, StoreClient] = self._local.__dict__.pop("clients", {})
        for client in clients.values():
            client.close()
            if client in self._clients:
                self._clients.remove(client)

    def client(self, store: int) -> StoreClient:
        """This thread's connection to a store."""
        clients: dict[int, StoreClient] = self._local.__dict__.setdefault("clients", {})
        if store not in clients:
            host, port = self.address.stores[store]
            clients[store] = StoreClient(host, port, self.address.token, self.timeout)
            self._clients.append(clients[store])
        return clients[store]

    def put(
        self,
        path: str | os.PathLike[str],
        name: str,
        strategy: str = "hybrid",
        replicas: int = 1,
        origin: str | None = None,
    ) -> FileManifest:
        """Put a local file under a name; it is there, or replaces what was, only when all of its pieces are.

        Each piece goes to `replicas` stores.  With an `origin`, a URL that fsspec reads, stores may forget pieces.
        """
        check_name(manifest_name(name))
        live = self._live()
        if not 1 <= replicas <= len(live):
            raise StoreError(f"{replicas} copies need as many stores, and {len(live)} can be reached.")
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = memoryview(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) if size else b"")
        runs = _runs(str(path), data)
        pieces = [
            Piece(
                one.offset,
                one.length,
                checksum_of_bytes(data[one.offset : one.offset + one.length]),
                tuple(live[(one.store + copy) % len(live)] for copy in range(replicas)),
            )
            for one in cut(runs, len(live), strategy, xxhash.xxh3_64_intdigest(name.encode()))
        ]
        manifest = FileManifest(name, size, tuple(pieces), origin, strategy)

        def put_on(store: int) -> None:
            for piece in pieces:
                if store in piece.stores:
                    bytes_ = data[piece.offset : piece.offset + piece.length]
                    self.client(store).put(manifest.object_of(piece), bytes_, pinned=origin is None)

        self._on_each(live, put_on)
        self._on_each(live, lambda store: self.client(store).put(manifest_name(name), manifest.encode()))
        kept = {manifest.object_of(piece) for piece in pieces}
        self._on_each(live, lambda store: self._delete_pieces(store, name, kept))
        return manifest

    def files(self, prefix: str = "") -> list[str]:
        """The names of the files in the pool that begin with a prefix."""
        start = len(manifest_name(""))
        found = self._from_any(lambda client: client.list(manifest_name(prefix)))
        return sorted(check_name(name[start:]) for name in found)

    def manifest(self, name: str) -> FileManifest:
        """What a file is made of; `MissingError` if there is none of this name."""
        check_name(manifest_name(name))
        try:
            data = self._from_any(lambda client: client.get(manifest_name(name)))
        except MissingError:
            raise MissingError(f"There is no {name} in the pool.") from None
        return FileManifest.decode(name, data)

    def remove(self, name: str) -> None:
        """Remove a file from all stores; `MissingError` if there is none of this name."""
        self.manifest(name)

        def remove_from(store: int) -> None:
            try:
                self.client(store).delete(manifest_name(name))
            except MissingError:
                pass  # of a store that was gone when the file was put
            self._delete_pieces(store, name, set())

        self._on_each(self._live(), remove_from)

    def statistics(self) -> list[dict[str, int] | str]:
        """What each store says about itself, or why it cannot be reached."""

        def ask(store: int) -> dict[str, int] | str:
            try:
                return self.client(store).statistics()
            except (OSError, StoreError) as error:
                return str(error)

        return [ask(store) for store in range(len(self.address.stores))]

    def lose(self, store: int, error: Exception) -> None:
        """Note that a store cannot be reached; it is not asked again by this object."""
        self.lost[store] = str(error)

    def _live(self) -> list[int]:
        for store in range(len(self.address.stores)):
            if store not in self.lost:
                try:
                    self.client(store).statistics()
                except OSError as error:
                    self.lose(store, error)
        live = [store for store in range(len(self.address.stores)) if store not in self.lost]
        if not live:
            raise StoreError(
                f"No store of the pool can be reached: {self.lost}. Start it with `optimum-trn pool serve`."
            )
        return live

    def _from_any(self, action: Callable[[StoreClient], T]) -> T:
        missing: MissingError | None = None
        for store in range(len(self.address.stores)):
            if store in self.lost:
                continue
            try:
                return action(self.client(store))
            except MissingError as error:  # a store that was started later
                missing = error
            except OSError as error:
                self.lose(store, error)
        if missing is not None:
            raise missing
        raise StoreError(f"No store of the pool can be reached: {self.lost}. Start it with `optimum-trn pool serve`.")

    def _on_each(self, stores: Sequence[int], action: Callable[[int], Any]) -> None:
        def act(store: int) -> None:
            try:
                action(store)
            finally:
                self.leave_thread()

        with ThreadPoolExecutor(len(stores)) as executor:
            for future in [executor.submit(act, store) for store in stores]:
                try:
                    future.result()
                except OSError as error:
                    raise StoreError(f"A store of the pool has gone: {error}.") from error

    def _delete_pieces(self, store: int, name: str, kept: set[str]) -> None:
        prefix = pieces_prefix(name)
        for found in self.client(store).list(prefix):
            if "/" not in found.removeprefix(prefix) and found not in kept:
                self.client(store).delete(found)


def put_directory(
    pool: Pool, directory: str | os.PathLike[str], name: str, strategy: str = "hybrid", replicas: int = 1
) -> list[FileManifest]:
    """Put the files of a directory below a name, which stays their origin; `StoreError` if there are none."""
    root = Path(directory).resolve()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if not files:
        raise StoreError(f"{root} is no directory with files. Give that of a saved model.")
    return [
        pool.put(path, f"{name}/{path.relative_to(root).as_posix()}", strategy, replicas, origin=path.as_uri())
        for path in files
    ]


def _runs(path: str, data: memoryview) -> list[tuple[int, int]]:
    if not path.endswith(".safetensors") or len(data) < 8:
        return [(0, len(data))] if len(data) else []
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(len(data), MAX_HEADER):
        raise StoreError(f"{path} is no safetensors file: its header would have {end} bytes.")
    return layer_runs(bytes(data[:end]), len(data))
