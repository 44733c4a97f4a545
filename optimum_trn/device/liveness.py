"""Tells process groups that a peer died: one TCP connection to each, which the kernel closes with the process.

A process that ends in order says so first, so that the ranks that are still busy with each other go on undisturbed.
"""

import atexit
import multiprocessing.util
import os
import selectors
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

from torch._C._distributed_c10d import Store

HELLO = b"neuron-peer %s\n"
LEAVING = b"L"
CONNECT_SECONDS = 60.0


class Group(Protocol):
    """What a process group shows of itself here (csrc/process_group.cpp, GroupState)."""

    @property
    def closed(self) -> bool: ...

    def fail(self, reason: str) -> None: ...


class Peers:
    """The peer processes of this one; groups that lose one of theirs are failed.

    A peer is known by the address that it listens on. Of two peers, the one with the smaller address connects.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=256)
        self.address = f"{local_host()}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        self._left: set[str] = set()
        self._dead: set[str] = set()
        self._groups: list[tuple[Mapping[str, int], Group]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda: self._wake_reader.recv(64))
        self._ended = False
        self._thread = threading.Thread(target=self._watch_sockets, name="neuron-liveness", daemon=True)
        self._thread.start()

    def watch(self, ranks: Mapping[str, int], group: Group) -> None:
        """Fail `group` once one of its processes, given by address, dies; or now if one has."""
        for address in sorted(ranks):
            if self.address < address:
                self._connect(address)
        with self._lock:
            self._groups = [(members, known) for members, known in self._groups if not known.closed]
            self._groups.append((ranks, group))
            dead = self._dead & ranks.keys()
        for address in dead:
            group.fail(_reason(ranks[address]))

    def leave(self) -> None:
        """Tell every peer that this process ends in order."""
        with self._lock:
            for connection in self._connections.values():
                try:
                    connection.sendall(LEAVING)
                except OSError:
                    pass  # that peer has gone before us

    def end(self) -> None:
        """Stop watching: a thread that still runs when the interpreter ends is torn down in the middle of C++."""
        self._ended = True
        self._wake_writer.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CONNECT_SECONDS)

    def close_in_child(self) -> None:
        """A forked child must not keep the connections of its parent open, or the parent's death would go unseen."""
        for connection in (self._listener, self._wake_reader, self._wake_writer, *self._connections.values()):
            connection.close()

    # ------------------------------------------------------------------------------------------------- connections

    def _connect(self, address: str) -> None:
        with self._lock:
            if address in self._connections or address in self._dead:
                return
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
            connection.sendall(HELLO % self.address.encode())
        except OSError:
            self._died(address)
            return
        self._keep(address, connection)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(CONNECT_SECONDS)
        try:
            words = connection.makefile("rb").readline(256).split()
        except OSError:
            words = []
        if len(words) != 2 or words[0] != HELLO.split()[0]:  # somebody else's connection
            connection.close()
            return
        self._keep(words[1].decode(), connection)

    def _keep(self, address: str, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes does not close anything
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        with self._lock:
            self._connections[address] = connection
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(address, connection))
        self._wake_writer.send(b"x")  # epoll notices by itself, other selectors do not

    def _watch_sockets(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select():
                key.data()

    def _hear(self, address: str, connection: socket.socket) -> None:
        try:
            data = connection.recv(16)
        except OSError:
            data = b""
        if data:
            with self._lock:
                self._left.add(address)
            return
        with self._lock:
            self._selector.unregister(connection)
            self._connections.pop(address, None)
            in_order = address in self._left
        connection.close()
        if not in_order:
            self._died(address)

    def _died(self, address: str) -> None:
        with self._lock:
            self._dead.add(address)
            concerned = [(ranks[address], group) for ranks, group in self._groups if address in ranks]
        for rank, group in concerned:
            group.fail(_reason(rank))


def _reason(rank: int) -> str:
    return f"rank {rank} of the group died (its process ended without leaving the group)."


def local_host() -> str:
    """This host's address as the others can reach it: the one that packets to MASTER_ADDR leave from."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            host: str = probe.getsockname()[0]
            return host if family == socket.AF_INET else "127.0.0.1"
    except OSError:
        return "127.0.0.1"


_peers: Peers | None = None


def _start() -> Peers:
    global _peers
    if _peers is None:
        _peers = Peers()
        # atexit does not run in children of multiprocessing, its own finalizers do; saying it twice does no harm.
        atexit.register(_leave_in_order)
        multiprocessing.util.Finalize(None, _leave_in_order, exitpriority=0)
    return _peers


def _leave_in_order() -> None:
    failed = getattr(sys, "last_value", None) is not None  # set where an exception ended the script
    if _peers is not None:
        if not failed:
            _peers.leave()
        _peers.end()


def _forget_in_child() -> None:
    global _peers
    if _peers is not None:
        _peers.close_in_child()
        _peers = None


os.register_at_fork(after_in_child=_forget_in_child)


def announce(store: Store, rank: int) -> None:
    """Publish this process's address in a new group's store."""
    store.set(f"neuron/peer/{rank}", _start().address)


def watch(store: Store, size: int, group: Group) -> None:
    """Fail `group` when a process that announced itself in its store dies."""
    peers = _start()
    peers.watch({store.get(f"neuron/peer/{rank}").decode(): rank for rank in range(size)}, group)
