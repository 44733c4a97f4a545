"""Reads ranges of files from the stores of a pool, group after group, from all stores at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from fsspec.core import url_to_fs

from ..errors import MissingError, StoreError
from ..store.protocol import checksum_of_bytes
from .client import Pool
from .manifest import FileManifest, Piece


class Wanted(NamedTuple):
    """A range of a file and the writable buffer of the same length that it belongs into."""

    file: FileManifest
    offset: int
    buffer: memoryview


class Part(NamedTuple):
    """What of one piece is wanted, and which of its stores have not failed to give it."""

    group: int
    file: FileManifest
    piece: Piece
    offset: int
    buffer: memoryview
    stores: tuple[int, ...]


class Fetch:
    """One thread for each store reads the parts that it holds of each group, in the order of the groups.

    `on_group` is told the number of each group when all of it is there, by the thread that brought the last of it, in
    any order where stores differ in speed.  What a store does not give is read from the next that holds it, or from
    the file's origin; if nobody has it, `on_error` is told once. `arrived` is told bytes as they come.
    """

    def __init__(
        self,
        pool: Pool,
        groups: Sequence[Iterable[Wanted]],
        on_group: Callable[[int], None],
        on_error: Callable[[Exception], None],
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self.pool = pool
        self._on_group = on_group
        self._on_error = on_error
        self._arrived = arrived
        self._lock = threading.Lock()
        self._failed = False
        parts = [part for number, group in enumerate(groups) for wanted in group for part in _parts(number, wanted)]
        self._left = [0] * len(groups)
        for part in parts:
            self._left[part.group] += 1
        self._empty = [number for number, left in enumerate(self._left) if not left]
        queues = _by_first_store([part._replace(stores=self._reachable(part.stores)) for part in parts])
        self._threads = [
            threading.Thread(target=self._run, args=(store, queue), name=f"fetch-{store}", daemon=True)
            for store, queue in queues.items()
        ]

    def start(self) -> None:
        """Begin to read."""
        for number in self._empty:
            self._on_group(number)
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all is read, or one part cannot be."""
        for thread in self._threads:
            thread.join()

    def cancel(self) -> None:
        """Stop reading soon, and say nothing about it."""
        self._failed = True

    def _reachable(self, stores: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(store for store in stores if store not in self.pool.lost)

    def _run(self, store: int | None, parts: list[Part]) -> None:
        try:
            self._read(store, parts)
        except Exception as error:  # of this thread, which nobody asks for its result
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                self._on_error(error)
        finally:
            self.pool.leave_thread()

    def _read(self, store: int | None, parts: list[Part], reason: Exception | None = None) -> None:
        """Read parts from a store, or, if that is None, from their origin; what it does not give, from the next."""
        if store is None:
            for part in parts:
                self._read_origin(part, reason)
                self._finish([part])
            return
        batches = _by_group(parts)
        while batches and not self._failed:
            done = 0
            client = self.pool.client(store)
            try:
                for _ in client.read_batches([_request(batch) for batch in batches], self._arrived):
                    _verify(batches[done])
                    self._finish(batches[done])
                    done += 1
                    if self._failed:
                        client.close()  # what is under way is of no use any more
                        return
                return
            except MissingError as error:
                client.close()
                self._read_elsewhere(batches[done], store, error)
                batches = batches[done + 1 :]
            except (OSError, StoreError) as error:
                self.pool.lose(store, error)
                self._read_elsewhere([part for batch in batches[done:] for part in batch], store, error)
                return

    def _read_elsewhere(self, parts: list[Part], store: int, reason: Exception) -> None:
        rest = [part._replace(stores=tuple(one for one in part.stores if one != store)) for part in parts]
        rest = [part._replace(stores=self._reachable(part.stores)) for part in rest]
        for other, queue in _by_first_store(rest).items():
            self._read(other, queue, reason)

    def _read_origin(self, part: Part, reason: Exception | None) -> None:
        file, piece = part.file, part.piece
        if file.origin is None:
            raise StoreError(
                f"Bytes {piece.offset} to {piece.offset + piece.length} of {file.name} are lost ({reason}), and the "
                f"pool has no other copy. Put the file again; with replicas=2 it survives a store."
            ) from reason
        try:
            filesystem, path = url_to_fs(file.origin)
            data = filesystem.cat_file(path, start=piece.offset, end=piece.offset + piece.length)
        except OSError as error:
            raise StoreError(f"{file.name} is lost ({reason}), and its origin cannot be read: {error}.") from error
        if checksum_of_bytes(data) != piece.checksum:
            raise StoreError(f"{file.name} is lost ({reason}), and {file.origin} has changed since. Put it again.")
        part.buffer[:] = data[part.offset : part.offset + len(part.buffer)]
        if self._arrived is not None:
            self._arrived(len(part.buffer))

    def _finish(self, parts: list[Part]) -> None:
        number = parts[0].group
        with self._lock:
            self._left[number] -= len(parts)
            complete = not self._left[number] and not self._failed
        if complete:
            self._on_group(number)


def read(pool: Pool, wanted: Sequence[Wanted], arrived: Callable[[int], None] | None = None) -> None:
    """Read ranges and wait for them; raises what `Fetch` tells."""
    errors: list[Exception] = []
    fetch = Fetch(pool, [wanted], lambda number: None, errors.append, arrived)
    fetch.start()
    fetch.join()
    if errors:
        raise errors[0]


def _parts(group: int, wanted: Wanted) -> Iterable[Part]:
    position = 0
    for piece, offset, length in wanted.file.within(wanted.offset, len(wanted.buffer)):
        buffer = wanted.buffer[position : position + length]
        yield Part(group, wanted.file, piece, offset, buffer, piece.stores)
        position += length


def _request(parts: list[Part]) -> tuple[list[tuple[str, int, int]], list[memoryview]]:
    ranges = [(part.file.object_of(part.piece), part.offset, len(part.buffer)) for part in parts]
    return ranges, [part.buffer for part in parts]


def _verify(parts: list[Part]) -> None:
    for part in parts:
        whole = len(part.buffer) == part.piece.length
        if whole and checksum_of_bytes(part.buffer) != part.piece.checksum:
            raise MissingError(f"A store has other bytes of {part.file.name} than were put.")


def _by_group(parts: list[Part]) -> list[list[Part]]:
    return [list(group) for _, group in groupby(parts, key=lambda part: part.group)]


def _by_first_store(parts: list[Part]) -> dict[int | None, list[Part]]:
    queues: dict[int | None, list[Part]] = {}
    for part in parts:
        queues.setdefault(part.stores[0] if part.stores else None, []).append(part)
    return queues
