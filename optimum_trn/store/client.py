"""The client of a store: puts, reads, lists and deletes objects over one connection."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import MissingError, StoreError
from .protocol import (
    CHUNK_SIZE,
    HEADER,
    MAX_PAYLOAD,
    NONCE_SIZE,
    PROOF_SIZE,
    Header,
    Operation,
    check_payload,
    checksum_of_bytes,
    decode_header,
    decode_meta,
    encode,
    proof,
)

Range = tuple[str, int, int]  # the name of an object, and which bytes of it: offset, length
RANGES_PER_REQUEST = 5_000
CHECKSUMS_PER_REQUEST = 5_000


class StoreClient:
    """One connection to a store; not for two threads at once.

    All methods raise `StoreError` for what the store refuses (`MissingError`: it does not have it) and OSError if it
    cannot be reached or does not answer within `timeout` seconds, after which the connection is opened anew on next
    use.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: float = 60.0) -> None:
        self.address = (host, port)
        self.token = token
        self.timeout = timeout
        self._socket: socket.socket | None = None

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def put(
        self,
        name: str,
        data: Any,
        pinned: bool = True,
        pace: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Store a buffer under a name, instead of what was there, from one moment to the next.

        The store may forget the bytes when its memory is full unless the object is `pinned`.  Only chunks that the
        store does not have are sent, each of so many bytes within what `pace` makes of their number.
        """
        paced = pace or (lambda size: nullcontext())
        view = memoryview(data).cast("B")
        parts = [view[start : start + CHUNK_SIZE] for start in range(0, len(view), CHUNK_SIZE)]
        checksums = [checksum_of_bytes(part) for part in parts]
        for start in range(0, len(parts), CHECKSUMS_PER_REQUEST):
            some = checksums[start : start + CHECKSUMS_PER_REQUEST]
            missing = set(self.ask(Operation.HAVE, {"chunks": some})["missing"])
            for checksum, part in zip(some, parts[start : start + CHECKSUMS_PER_REQUEST], strict=True):
                if checksum in missing:
                    missing.discard(checksum)
                    with paced(len(part)):
                        self.ask(Operation.CHUNK, {"checksum": checksum}, part)
        chunks = [[checksum, len(part)] for checksum, part in zip(checksums, parts, strict=True)]
        self.ask(Operation.COMMIT, {"name": name, "chunks": chunks, "pinned": pinned})

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytearray:
        """The bytes of an object, or a range of them."""
        if length is None:
            length = self.size(name) - offset
        buffer = bytearray(length)
        self.read_into([(name, offset, length)], [memoryview(buffer)])
        return buffer

    def read_into(
        self, ranges: Sequence[Range], buffers: Sequence[memoryview], arrived: Callable[[int], None] | None = None
    ) -> None:
        """Read ranges into writable buffers of the same lengths; `arrived` is told the bytes as they come."""
        for _ in self.read_batches([(ranges, buffers)], arrived):
            pass

    def read_batches(
        self,
        batches: Sequence[tuple[Sequence[Range], Sequence[memoryview]]],
        arrived: Callable[[int], None] | None = None,
    ) -> Iterator[int]:
        """Read batches of ranges into their buffers, one after the other; yields the number of each that is there.

        The next request is under way while one is answered.
        """
        requests = [
            (number, some, into)
            for number, (ranges, buffers) in enumerate(batches)
            for some, into in _requests(ranges, buffers)
        ]
        for _, some, _ in requests[:2]:
            self._send(Operation.READ, {"ranges": some})
        done = 0
        for index, (number, _, into) in enumerate(requests):
            while done < number:
                yield done
                done += 1
            header, _ = self._receive_header()
            if header.payload_size != sum(map(len, into)):
                raise self._broken(f"it answers with {header.payload_size} bytes")
            for buffer in into:
                self._receive(buffer, arrived)
            self._check(header, into)
            if index + 2 < len(requests):
                self._send(Operation.READ, {"ranges": requests[index + 2][1]})
        yield from range(done, len(batches))

    def size(self, name: str) -> int:
        """The bytes of an object."""
        found = dict(self.ask(Operation.LIST, {"prefix": name, "after": name[:-1]})["objects"])
        if name not in found:
            raise MissingError(f"There is no {name} in the store at {self._place}.")
        return int(found[name])

    def list(self, prefix: str = "") -> dict[str, int]:
        """The objects whose name begins with a prefix, and their bytes."""
        found: dict[str, int] = {}
        after, more = "", True
        while more:
            answer = self.ask(Operation.LIST, {"prefix": prefix, "after": after})
            found.update(answer["objects"])
            after, more = max(found, default=""), answer["more"]
        return found

    def delete(self, name: str) -> None:
        """Forget an object."""
        self.ask(Operation.DELETE, {"name": name})

    def statistics(self) -> dict[str, int]:
        """What the store holds and has served: "memory", "used", "objects", "evictions", "served"."""
        return self.ask(Operation.STATISTICS, {})

    @property
    def _place(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def exchange(
        self, operation: Operation, meta: dict[str, Any], payload: memoryview
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a request with bytes that is answered with bytes, and give both parts of the answer."""
        self._send(operation, meta, payload)
        header, answer = self._receive_header()
        data = bytearray(header.payload_size)
        self._receive(memoryview(data))
        self._check(header, [memoryview(data)])
        return answer, data

    def ask(self, operation: Operation, meta: dict[str, Any], payload: memoryview | None = None) -> dict[str, Any]:
        """Send a request that is answered without bytes, and give the answer."""
        self._send(operation, meta, payload)
        header, answer = self._receive_header()
        if header.payload_size:
            raise self._broken(f"it answers {operation.name} with bytes")
        return answer

    def _send(self, operation: Operation, meta: dict[str, Any], payload: memoryview | None = None) -> None:
        parts = [] if payload is None else [payload]
        try:
            connection = self._connected()
            connection.sendall(encode(operation, meta, parts))
            for part in parts:
                connection.sendall(part)
        except OSError:
            self.close()
            raise

    def _receive_header(self) -> tuple[Header, dict[str, Any]]:
        """The head of the next answer; raises what the store raised."""
        head = bytearray(HEADER.size)
        self._receive(memoryview(head))
        try:
            header = decode_header(bytes(head))
            text = bytearray(header.meta_size)
            self._receive(memoryview(text))
            meta = decode_meta(bytes(text))
        except StoreError:
            self.close()
            raise
        if header.operation is Operation.REFUSED:
            self.close()  # answers to requests that are under way are of no use any more
            kind = MissingError if meta.get("missing") else StoreError
            raise kind(f"The store at {self._place}: {meta.get('text')}")
        return header, meta

    def _receive(self, buffer: memoryview, arrived: Callable[[int], None] | None = None) -> None:
        try:
            while buffer:
                count = self._connected().recv_into(buffer)
                if not count:
                    raise ConnectionResetError(f"The store at {self._place} ended the connection.")
                if arrived is not None:
                    arrived(count)
                buffer = buffer[count:]
        except OSError:
            self.close()
            raise

    def _check(self, header: Header, payload: Sequence[memoryview]) -> None:
        try:
            check_payload(header, payload)
        except StoreError:
            self.close()
            raise

    def _broken(self, what: str) -> StoreError:
        self.close()
        return StoreError(f"The store at {self._place} does not keep to the protocol: {what}.")

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.create_connection(self.address, self.timeout)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._authenticate(connection)
            except BaseException:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _authenticate(self, connection: socket.socket) -> None:
        nonce = os.urandom(NONCE_SIZE)
        nonces = _exactly(connection, NONCE_SIZE) + nonce
        connection.sendall(nonce + proof(self.token, "client", nonces))
        try:
            answer = _exactly(connection, PROOF_SIZE)
        except ConnectionError:
            raise StoreError(f"The store at {self._place} has another token.") from None
        if not hmac.compare_digest(answer, proof(self.token, "store", nonces)):
            raise StoreError(f"What listens at {self._place} does not know the token: it is not the store.")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("The other side ended the connection.")
        data += part
    return bytes(data)


def _requests(ranges: Sequence[Range], buffers: Sequence[memoryview]) -> Iterator[tuple[list[Range], list[memoryview]]]:
    """Ranges and their buffers in requests of at most `MAX_PAYLOAD` bytes; larger ranges are cut."""
    batch: list[Range] = []
    into: list[memoryview] = []
    size = 0
    for (name, offset, length), buffer in zip(ranges, buffers, strict=True):
        if length != len(buffer):
            raise ValueError(f"{length} bytes of {name} do not fit a buffer of {len(buffer)}.")
        for start in range(0, length, MAX_PAYLOAD):
            count = min(MAX_PAYLOAD, length - start)
            if batch and (size + count > MAX_PAYLOAD or len(batch) == RANGES_PER_REQUEST):
                yield batch, into
                batch, into, size = [], [], 0
            batch.append((name, offset + start, count))
            into.append(buffer[start : start + count])
            size += count
    if batch:
        yield batch, into
