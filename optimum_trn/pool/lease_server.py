"""Lends the cores of a host over the network: a lease lasts as long as the connection that asked for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from ..errors import StoreError
from ..store.frames import Answer, FrameServer, Session, count_of, text_of
from ..store.protocol import Operation
from .leases import Lease, LeaseTable


class LeaseServer(FrameServer):
    """Serves a table of leases; see `FrameServer`."""

    def __init__(self, cores: int, token: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(token, host, port)
        self.table = LeaseTable(cores)

    def session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LeaseSession:
        """What answers one connection."""
        return LeaseSession(self, self.table, reader, writer)


class LeaseSession(Session):
    """One connection, and its lease."""

    def __init__(
        self, server: FrameServer, table: LeaseTable, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(server, reader, writer)
        self.table = table
        self.lease: Lease | None = None

    def answer(self, operation: Operation, meta: dict[str, Any], payload: bytes) -> Answer:
        """See `Operation`."""
        now = time.monotonic()
        if operation is Operation.ASK:
            if self.lease is not None:
                raise StoreError("This connection has asked already: give back first.")
            lease = Lease(
                text_of(meta["job"]),
                count_of(meta["cores"]),
                count_of(meta["priority"]),
                meta["preemptible"] is True,
            )
            self.table.ask(lease, now)
            self.lease = lease
            return {}, []
        if operation is Operation.LEASE:
            self.table.settle(now)  # waiting may have made another the first
            lease_ = self.lease
            if lease_ is None:
                raise StoreError("This connection has not asked for cores.")
            return {"cores": list(lease_.cores) if lease_.cores is not None else None, "wanted": lease_.wanted}, []
        if operation is Operation.GIVE_BACK:
            self.close()
            return {}, []
        if operation is Operation.METRICS:
            jobs = {job: asdict(metrics) for job, metrics in self.table.metrics.items()}
            return {"jobs": jobs, "free": len(self.table.free), "waiting": len(self.table.waiting)}, []
        raise StoreError(f"Who lends cores is not asked for {operation.name}.")

    def close(self) -> None:
        """Take the cores of a client back that has gone."""
        if self.lease is not None:
            self.table.release(self.lease, time.monotonic())
            self.lease = None
