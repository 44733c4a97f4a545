"""A store that serves objects over the network, to those who know its token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import StoreError
from .frames import Answer, FrameServer, Session, count_of, list_of, text_of
from .protocol import MAX_PAYLOAD, Operation
from .shelf import Shelf

LISTED = 1000  # objects in one answer to LIST
MAX_RANGES = 10_000


class StoreServer(FrameServer):
    """Serves a shelf; see `FrameServer`."""

    def __init__(self, shelf: Shelf, token: bytes, host: str = "127.0.0.1", port: int = 0, rate: float | None = None):
        super().__init__(token, host, port, rate)
        self.shelf = shelf

    def session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> StoreSession:
        """What answers one connection."""
        return StoreSession(self, self.shelf, reader, writer)

    async def close(self) -> None:
        """Stop listening, end all connections and remove what is on disk."""
        await super().close()
        self.shelf.close()


class StoreSession(Session):
    """One connection to a store."""

    def __init__(
        self, server: FrameServer, shelf: Shelf, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(server, reader, writer)
        self.shelf = shelf
        self._pending: list[str] = []  # chunks that are kept for objects that are still to be committed

    def answer(self, operation: Operation, meta: dict[str, Any], payload: bytes) -> Answer:
        """See `Operation`."""
        handler = self._HANDLERS.get(operation)
        if handler is None:
            raise StoreError(f"A store is not asked for {operation.name}.")
        return handler(self, meta, payload)

    def close(self) -> None:
        """Drop the chunks of objects that were never committed."""
        self.shelf.release(self._pending)
        self._pending = []

    def _have(self, meta: dict[str, Any], payload: bytes) -> Answer:
        checksums = [text_of(checksum) for checksum in list_of(meta["chunks"])]
        here = [checksum for checksum in checksums if self.shelf.has(checksum)]
        self.shelf.refer(here)
        self._pending += here
        return {"missing": [checksum for checksum in checksums if not self.shelf.has(checksum)]}, []

    def _chunk(self, meta: dict[str, Any], payload: bytes) -> Answer:
        checksum = text_of(meta["checksum"])
        self.shelf.hold(checksum, payload)
        self._pending.append(checksum)
        return {}, []

    def _commit(self, meta: dict[str, Any], payload: bytes) -> Answer:
        chunks = [(text_of(checksum), count_of(size)) for checksum, size in list_of(meta["chunks"])]
        self.shelf.commit(meta["name"], chunks, meta["pinned"] is not False)
        self.close()
        return {}, []

    def _read(self, meta: dict[str, Any], payload: bytes) -> Answer:
        ranges = list_of(meta["ranges"])
        if len(ranges) > MAX_RANGES:
            raise StoreError(f"{len(ranges)} ranges at once are refused: ask for at most {MAX_RANGES}.")
        if sum(count_of(length) for _, _, length in ranges) > MAX_PAYLOAD:
            raise StoreError(f"More than {MAX_PAYLOAD} bytes at once are refused: read in several requests.")
        views: list[memoryview] = []
        for name, offset, length in ranges:
            views += self.shelf.read(name, count_of(offset), length)
        return {}, views

    def _list(self, meta: dict[str, Any], payload: bytes) -> Answer:
        prefix, after = text_of(meta["prefix"]), text_of(meta["after"])
        names = sorted(name for name in self.shelf.objects if name.startswith(prefix) and name > after)
        listed = [[name, self.shelf.objects[name].size] for name in names[:LISTED]]
        return {"objects": listed, "more": len(names) > LISTED}, []

    def _delete(self, meta: dict[str, Any], payload: bytes) -> Answer:
        self.shelf.delete(meta["name"])
        return {}, []

    def _statistics(self, meta: dict[str, Any], payload: bytes) -> Answer:
        shelf = self.shelf
        return {
            "memory": shelf.memory,
            "used": shelf.used,
            "objects": len(shelf.objects),
            "evictions": shelf.evictions,
            "served": self.server.served,
        }, []

    _HANDLERS: dict[Operation, Callable[..., Answer]] = {
        Operation.HAVE: _have,
        Operation.CHUNK: _chunk,
        Operation.COMMIT: _commit,
        Operation.READ: _read,
        Operation.LIST: _list,
        Operation.DELETE: _delete,
        Operation.STATISTICS: _statistics,
    }
