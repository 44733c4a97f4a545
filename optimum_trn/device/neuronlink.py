"""Connects the processes of one host by NeuronLink (csrc/neuronlink.cpp): each maps the HBM of the others.

Descriptors travel over Unix sockets in a directory that only this user may enter and that is gone once a group is
connected. The memory itself has no name, so the kernel frees it with the last process, however that ends.
"""

import logging
import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from optimum_trn.device import runtime
from optimum_trn.device.build import load_extension

SECONDS = 60.0
"""How long a rank waits for another one to connect."""

logger = logging.getLogger(__name__)
_warned = False


def connect(store: Store, rank: int, size: int) -> Any:
    """The link of a group between its ranks, `NeuronLink` of the extension; None where gloo has to carry the group.

    That is so for ranks on different nodes, and, with a warning, where this system does not let processes share memory.
    Every rank of the group calls it.
    """
    if size == 1:
        return load_extension().NeuronLink(0, 1)
    link, problem = None, ""
    with tempfile.TemporaryDirectory(prefix="neuronlink-") as directory, socket.socket(socket.AF_UNIX) as listener:
        address = os.path.join(directory, "door")
        try:
            listener.bind(address)
            listener.listen(size)
        except OSError as error:
            address, problem = "", f"rank {rank}: {error}"
        store.set(f"neuron/link/{rank}", f"{node()}\n{address}")
        ranks = [store.get(f"neuron/link/{peer}").decode().split("\n") for peer in range(size)]
        if len({place for place, _ in ranks}) > 1:
            return None
        if all(door for _, door in ranks):
            try:
                link = _exchange(rank, [door for _, door in ranks], listener)
            except (OSError, RuntimeError) as error:
                problem = f"rank {rank}: {error}"
        store.set(f"neuron/link/outcome/{rank}", problem)
        problems = [store.get(f"neuron/link/outcome/{peer}").decode() for peer in range(size)]
    if not any(problems):
        return link
    _warn(next(filter(None, problems)))
    return None


def node() -> str:
    """Where this process runs: the kernel, the network and the launcher's node, all of which linked ranks share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.environ.get('GROUP_RANK', '0')}"


def _exchange(rank: int, doors: list[str], listener: socket.socket) -> Any:
    """Swap descriptors with every rank: knock at the doors of lower ranks, open to the higher ones."""
    extension = load_extension()
    size, device = len(doors), runtime.current_device()
    own = [extension.hbm_fd(device), extension.bell_fd()]
    control = -1
    if rank == 0:
        control = os.memfd_create("neuron-link", os.MFD_CLOEXEC)
        os.ftruncate(control, extension.NeuronLink.control_bytes(size))
    hbm, bells, pidfds = [-1] * size, [-1] * size, [-1] * size
    knocking = {}
    try:
        for peer in range(rank):
            connection = knocking[peer] = socket.socket(socket.AF_UNIX)
            connection.settimeout(SECONDS)
            connection.connect(doors[peer])
            socket.send_fds(connection, [struct.pack("i", rank)], own)
        listener.settimeout(SECONDS)
        for _ in range(rank + 1, size):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(SECONDS)
                peer, (hbm[peer], bells[peer], *_), pidfds[peer] = _receive(connection)
                socket.send_fds(connection, [struct.pack("i", rank)], own if rank else [*own, control])
        for peer, connection in knocking.items():
            _, (hbm[peer], bells[peer], *more), pidfds[peer] = _receive(connection)
            control = more[0] if more else control
        link = extension.NeuronLink(rank, size, device, control, hbm, bells, pidfds)
    except BaseException:
        for descriptor in (control, *hbm, *bells, *pidfds):
            if descriptor >= 0:
                os.close(descriptor)
        raise
    finally:
        for connection in knocking.values():
            connection.close()
    return link


def _receive(connection: socket.socket) -> tuple[int, list[int], int]:
    """A peer's rank, its descriptors, and a descriptor of its process."""
    message, descriptors, _, _ = socket.recv_fds(connection, 4, 3, socket.MSG_CMSG_CLOEXEC)
    if len(message) != 4 or len(descriptors) < 2:
        raise OSError("a peer hung up while descriptors were exchanged")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, _, _ = struct.unpack("3i", credentials)
    return struct.unpack("i", message)[0], descriptors, os.pidfd_open(process)


def _warn(problem: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning("NeuronLink is not available (%s); gloo carries the collectives, which is slower.", problem)
