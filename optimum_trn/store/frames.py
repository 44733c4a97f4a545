"""A server of authenticated frames: what all that listens on a port has in common."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import time
from typing import Any, TypeVar

from ..errors import MissingError, StoreError
from .protocol import (
    HEADER,
    NONCE_SIZE,
    PROOF_SIZE,
    Operation,
    check_payload,
    decode_header,
    decode_meta,
    encode,
    proof,
)

logger = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], list[memoryview]]
Self = TypeVar("Self", bound="FrameServer")

AUTHENTICATION_SECONDS = 20.0
FRAME_SECONDS = 120.0  # a frame that has begun must be there
BURST_SECONDS = 0.05  # of sending late that a throttle makes up for: it may be woken later than it asked for
PIECE = 64 << 10  # bytes that are written between two looks at the throttle


class Throttle:
    """An emulated link: spreads bytes over time so that no more than `rate` of them leave in a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until the link has carried what is before these bytes, and these."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + size / self.rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class FrameServer:
    """Answers frames on a TCP port; `async with` it, or `await start()` and `await close()`.

    Each connection is a session of its own, which `session` makes. `rate` in bytes per second emulates a slow link for
    all that is read. What a client sends wrong is refused, or ends its connection; it never ends the server.
    """

    def __init__(self, token: bytes, host: str = "127.0.0.1", port: int = 0, rate: float | None = None) -> None:
        if len(token) < 16:
            raise StoreError(f"A token of {len(token)} bytes can be guessed: give at least 16 random ones.")
        self.token = token
        self.host = host
        self.port = port
        self.throttle = Throttle(rate) if rate else None
        self.served = 0  # bytes read by clients
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    def session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Session:
        """What answers one connection."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; afterwards `port` is the one that was given."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await self._server.wait_closed()

    async def __aenter__(self: Self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        session = self.session(reader, writer)
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

    def __init__(self, server: FrameServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

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
        """What is to be done when the client has gone."""

    def answer(self, operation: Operation, meta: dict[str, Any], payload: bytes) -> Answer:
        """The JSON and the bytes that answer a request; KeyError, TypeError or ValueError for wrong arguments."""
        raise NotImplementedError

    def _answer(self, operation: Operation, meta: dict[str, Any], payload: bytes) -> Answer:
        try:
            return self.answer(operation, meta, payload)
        except StoreError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{operation.name} takes other arguments: {repr(error)[:200]}.") from None

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


def text_of(value: Any) -> str:
    """A value of a frame that must be text; TypeError else."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} is no text")
    return value


def count_of(value: Any) -> int:
    """A value of a frame that must be a count; TypeError else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{str(value)[:80]!r} is no count")
    return value


def list_of(value: Any) -> list[Any]:
    """A value of a frame that must be a list; TypeError else."""
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:80]!r} is no list")
    return value
