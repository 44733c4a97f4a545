"""What a store and its clients say to each other: bounded frames of JSON and bytes, and proof that both know a token.

A frame is a fixed header (magic, operation, lengths, checksum of the payload), a JSON object and a payload of bytes.
Nothing in it is ever executed or unpickled, and every length is checked before memory is taken for it.

A connection begins with a challenge in both directions, of HMAC-SHA256 (RFC 2104): the token itself is never sent, and
a client does not give its data to a stranger who listens on the store's port. What follows is not encrypted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import xxhash

from ..errors import StoreError

MAGIC = b"OTS1"
HEADER = struct.Struct(
    "!4sB3xIQ8s"
)  # magic, operation, bytes of the JSON, bytes of the payload, XXH3-64 of the payload
MAX_META = 1 << 20
MAX_PAYLOAD = 64 << 20
CHUNK_SIZE = 4 << 20  # of the chunks that a client cuts an object into
MAX_NAME = 512
NONCE_SIZE = 32
PROOF_SIZE = 32


class Operation(enum.IntEnum):
    """What a frame asks for, or answers."""

    HAVE = 1  # {"chunks": [checksum]} -> {"missing": [checksum]}
    CHUNK = 2  # {"checksum"} and the bytes: kept while the connection lasts, or an object holds them
    COMMIT = 3  # {"name", "chunks": [[checksum, size]], "pinned"}: an object is there, whole, or not at all
    READ = 4  # {"ranges": [[name, offset, length]]} -> the bytes, one range after the other
    LIST = 5  # {"prefix", "after"} -> {"objects": [[name, size]], "more"}
    DELETE = 6  # {"name"}
    STATISTICS = 7  # {} -> {...}
    ASK = 20  # of a lease server: {"job", "cores", "priority", "preemptible"}: wait for cores, one lease a connection
    LEASE = 21  # {} -> {"cores": [core] or null, "wanted"}
    GIVE_BACK = 22  # {}
    METRICS = 23  # {} -> {"jobs": {job: {...}}, "free"}
    INFER = 30  # of a worker: {"model"} and tensors in the safetensors format -> tensors
    DONE = 100
    REFUSED = 101  # {"text", "missing"}


class Header(NamedTuple):
    """The fixed part of a frame."""

    operation: Operation
    meta_size: int
    payload_size: int
    checksum: bytes


def encode(operation: Operation, meta: dict[str, Any], payload: Iterable[memoryview] = ()) -> bytes:
    """Header and JSON of a frame; the payload is to be sent after them. `StoreError` if either is too large."""
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False).encode()
    checksum, size = xxhash.xxh3_64(), 0
    for part in payload:
        checksum.update(part)
        size += len(part)
    _check_sizes(len(text), size)
    return HEADER.pack(MAGIC, operation, len(text), size, checksum.digest()) + text


def decode_header(data: bytes) -> Header:
    """The header of a frame; `StoreError` for anything else, and for lengths that no frame has."""
    magic, operation, meta_size, payload_size, checksum = HEADER.unpack(data)
    if magic != MAGIC:
        raise StoreError("This is not a frame of a store: is something else listening, or calling, on this port?")
    try:
        known = Operation(operation)
    except ValueError:
        raise StoreError(f"A store knows no operation {operation}: are client and store of the same version?") from None
    _check_sizes(meta_size, payload_size)
    return Header(known, meta_size, payload_size, checksum)


def decode_meta(text: bytes) -> dict[str, Any]:
    """The JSON object of a frame; `StoreError` for anything else."""
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise StoreError("The frame holds no JSON.") from None
    if not isinstance(meta, dict):
        raise StoreError("The frame holds JSON, but no object.")
    return meta


def check_payload(header: Header, payload: Iterable[memoryview | bytes | bytearray]) -> None:
    """`StoreError` if the bytes that arrived are not those that were sent."""
    checksum = xxhash.xxh3_64()
    for part in payload:
        checksum.update(part)
    if checksum.digest() != header.checksum:
        raise StoreError("A frame was damaged on its way: the checksum of its payload differs.")


def _check_sizes(meta_size: int, payload_size: int) -> None:
    if meta_size > MAX_META or payload_size > MAX_PAYLOAD:
        raise StoreError(
            f"A frame of {meta_size} bytes of JSON and {payload_size} of payload is refused: it may have at most "
            f"{MAX_META} and {MAX_PAYLOAD}."
        )


def check_name(name: Any) -> str:
    """A name of an object: path segments between slashes. `StoreError` for what could lead out of a directory."""
    if not isinstance(name, str) or not name or len(name.encode(errors="replace")) > MAX_NAME:
        raise StoreError(f"A name is text of 1 to {MAX_NAME} bytes, not {str(name)[:80]!r}.")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or not name.isprintable():
        raise StoreError(f"{name[:80]!r} is refused as a name: give path segments without '..', as in 'model/file'.")
    return name


def checksum_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """The address of a chunk: XXH3 of 128 bits, as in `Chunk`, which finds damage and duplicates, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def proof(token: bytes, role: str, nonces: bytes) -> bytes:
    """What shows that the one in a role ("client" or "store") knows the token."""
    return hmac.digest(token, role.encode() + nonces, hashlib.sha256)
