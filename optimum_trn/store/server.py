"""A store that serves objects over the network, to those who know its token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from ..errors import MissingError, StoreError
from .protocol import (
    HEADER,
    MAX_PAYLOAD,
    NONCE_SIZE,
    PROOF_SIZE,
    Operation,
    check_payload,
    decode_header,
    decode_meta,
    encode,
    proof,
)
from .shelf import Shelf

logger = logging.getLogger(__name__)

AUTHENTICATION_SECONDS = 20.0
FRAME_SECONDS = 120.0  # a frame that has begun must be there
PIECE = 64 << 10  # bytes that are written between two looks at the throttle
LISTED = 1000  # objects in one answer to LIST
MAX_RANGES = 10_000


class Throttle:
    """An emulated link: spreads bytes over time so that no more than `rate` of them leave in a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until the link has carried what is before these bytes, and these."""
        self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
        await asyncio.sleep(self._free_at - time.monotonic())


class StoreServer:
    """Serves a shelf on a TCP port; `async with` it, or `await start()` and `await close()`.

    `rate` in bytes per second emulates a slow link for all that is read. What a client sends wrong is refused, or ends
    its connection; it never ends the server.
    """

    def __init__(self, shelf: Shelf, token: bytes, host: str = "127.0.0.1", port: int = 0, rate: float | None = None):
        if len(token) < 16:
            raise StoreError(f"A token of {len(token)} bytes can be guessed: give at least 16 random ones.")
        self.shelf = shelf
        self.token = token
        self.host = host
        self.port = port
        self.throttle = Throttle(rate) if rate else None
        self.served = 0  # bytes read by clients
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen; afterwards `port` is the one that was given."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, end all connections and remove what is on disk."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await self._server.wait_closed()
        self.shelf.close()

    async def __aenter__(self) -> StoreServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        session = Session(self, reader, writer)
        try:
            async with _deadline(AUTHENTICATION_SECONDS):
                known = await session.authenticate()
            if known:
                await session.run()
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError, OSError):
            pass  # the client has gone
        except StoreError as error:
            logger.warning("A store ends a connection: %s", error)
        finally:
            session.close()
            self._connections.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Session:
    """One connection: requests are answered in the order in which they come."""

    def __init__(self, server: StoreServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.shelf = server.shelf
        self.reader = reader
        self.writer = writer
        self._pending: list[str] = []  # chunks that are kept for objects that are still to be committed

    async def authenticate(self) -> bool:
        """Challenge the client and answer its challenge; False if it does not know the token."""
        nonce = os.urandom(NONCE_SIZE)
        self.writer.write(nonce)
        answer = await self.reader.readexactly(NONCE_SIZE + PROOF_SIZE)
        nonces = nonce + answer[:NONCE_SIZE]
        if not hmac.compare_digest(answer[NONCE_SIZE:], proof(self.server.token, "client", nonces)):
            return False
        self.writer.write(proof(self.server.token, "store", nonces))
        await self.writer.drain()
        return True

    async def run(self) -> None:
        """Answer until the client leaves; raises `StoreError` for what is no frame, after which nothing can be read."""
        while True:
            data = await self.reader.readexactly(HEADER.size)
            header = decode_header(data)
            async with _deadline(FRAME_SECONDS):
                text = await self.reader.readexactly(header.meta_size)
                payload = await self.reader.readexactly(header.payload_size)
            try:
                check_payload(header, [payload])
                answer, views = self._answer(header.operation, decode_meta(text), payload)
                await self._send(Operation.DONE, answer, views)
            except StoreError as error:
                await self._send(
                    Operation.REFUSED, {"text": str(error), "missing": isinstance(error, MissingError)}, []
                )
            except OSError as error:  # of the disk; if it is of the connection, sending fails again
                await self._send(Operation.REFUSED, {"text": f"The disk of the store: {error}", "missing": False}, [])

    def close(self) -> None:
        """Drop the chunks of objects that were never committed."""
        self.shelf.release(self._pending)
        self._pending = []

    def _answer(
        self, operation: Operation, meta: dict[str, Any], payload: bytes
    ) -> tuple[dict[str, Any], list[memoryview]]:
        handler = self._HANDLERS.get(operation)
        if handler is None:
            raise StoreError(f"{operation.name} is an answer, not a request.")
        try:
            return handler(self, meta, payload)
        except StoreError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{operation.name} takes other arguments: {repr(error)[:200]}.") from None

    def _have(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        checksums = [_text(checksum) for checksum in _sequence(meta["chunks"])]
        here = [checksum for checksum in checksums if self.shelf.has(checksum)]
        self.shelf.refer(here)
        self._pending += here
        return {"missing": [checksum for checksum in checksums if not self.shelf.has(checksum)]}, []

    def _chunk(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        checksum = _text(meta["checksum"])
        self.shelf.hold(checksum, payload)
        self._pending.append(checksum)
        return {}, []

    def _commit(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        chunks = [(_text(checksum), _count(size)) for checksum, size in _sequence(meta["chunks"])]
        self.shelf.commit(meta["name"], chunks, meta["pinned"] is not False)
        self.close()
        return {}, []

    def _read(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        ranges = _sequence(meta["ranges"])
        if len(ranges) > MAX_RANGES:
            raise StoreError(f"{len(ranges)} ranges at once are refused: ask for at most {MAX_RANGES}.")
        if sum(_count(length) for _, _, length in ranges) > MAX_PAYLOAD:
            raise StoreError(f"More than {MAX_PAYLOAD} bytes at once are refused: read in several requests.")
        views: list[memoryview] = []
        for name, offset, length in ranges:
            views += self.shelf.read(name, _count(offset), length)
        return {}, views

    def _list(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        prefix, after = _text(meta["prefix"]), _text(meta["after"])
        names = sorted(name for name in self.shelf.objects if name.startswith(prefix) and name > after)
        listed = [[name, self.shelf.objects[name].size] for name in names[:LISTED]]
        return {"objects": listed, "more": len(names) > LISTED}, []

    def _delete(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        self.shelf.delete(meta["name"])
        return {}, []

    def _statistics(self, meta: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], list[memoryview]]:
        shelf = self.shelf
        return {
            "memory": shelf.memory,
            "used": shelf.used,
            "objects": len(shelf.objects),
            "evictions": shelf.evictions,
            "served": self.server.served,
        }, []

    _HANDLERS: dict[Operation, Callable[..., tuple[dict[str, Any], list[memoryview]]]] = {
        Operation.HAVE: _have,
        Operation.CHUNK: _chunk,
        Operation.COMMIT: _commit,
        Operation.READ: _read,
        Operation.LIST: _list,
        Operation.DELETE: _delete,
        Operation.STATISTICS: _statistics,
    }

    async def _send(self, operation: Operation, meta: dict[str, Any], views: list[memoryview]) -> None:
        self.writer.write(encode(operation, meta, views))
        for view in views:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                if self.server.throttle is not None:
                    await self.server.throttle.take(len(piece))
                self.writer.write(piece)
                self.server.served += len(piece)
                await self.writer.drain()
        await self.writer.drain()


class _deadline:
    """Cancels what runs in it after some seconds and raises TimeoutError, as asyncio.timeout of Python 3.11 does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handle = asyncio.get_running_loop().call_later(self.seconds, self._expire, task)

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._expired = True
        task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise TimeoutError("The other side is too slow.")


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} is no text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{str(value)[:80]!r} is no count")
    return value


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:80]!r} is no list")
    return value
