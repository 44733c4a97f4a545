"""The controller of a job: hosts the store, watches over processes, and publishes who takes part."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimum_trn.device import launched
from optimum_trn.elastic.journal import Journal
from optimum_trn.elastic.membership import COMMITTED, GENERATION, Member, Snapshot

POLL_SECONDS = 0.01  # how late a death may be noticed
GRACE_SECONDS = 10.0  # for processes that are asked to end
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Node:
    """The processes of one node; `member` is new whenever the node comes back."""

    node: int
    member: int
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    agent: subprocess.Popen[bytes] | None = None
    joined: bool = False

    @property
    def lost(self) -> bool:
        """Whether one of its workers has ended otherwise than by finishing."""
        return any(worker.poll() not in (None, 0) for worker in self.workers)

    @property
    def finished(self) -> bool:
        """Whether all its workers have finished."""
        return all(worker.poll() == 0 for worker in self.workers)


class Controller:
    """Runs `command` on `nodes` nodes of `nproc_per_node` processes each, all of them on this host.

    A node is lost when one of its workers is; its other workers are then ended, too.  Up to `max_restarts` times, a
    lost node is started anew and comes back as another member.  `agent` is the command of a process of each node that
    outlives its workers.  When the controller dies, the kernel ends every process that it has started.
    """

    def __init__(
        self,
        command: Sequence[str],
        nodes: int,
        nproc_per_node: int = 1,
        fault_tolerance: int | None = None,
        directory: str | Path = "elastic",
        max_restarts: int = 0,
        agent: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.command = list(command)
        self.started = nodes
        self.nproc_per_node = nproc_per_node
        self.fault_tolerance = fault_tolerance
        self.directory = Path(directory)
        self.restarts_left = max_restarts
        self.agent = list(agent) if agent is not None else None
        self.environment = environment or {}
        self.journal = Journal(self.directory / "journal.jsonl")
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.store.set(GENERATION, "0")
        self.store.set(COMMITTED, "0")
        self.snapshot = Snapshot(0, ())
        self.active = True
        self.journaled = 0
        self.next_member = nodes
        self.nodes = [Node(node, node) for node in range(nodes)]

    # ---- Processes --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all nodes."""
        self.journal.write("controller", pid=os.getpid(), store=f"127.0.0.1:{self.store.port}", command=self.command)
        for node in self.nodes:
            self._start_node(node)

    def _start_node(self, node: Node) -> None:
        if self.agent is not None and (node.agent is None or node.agent.poll() is not None):
            node.agent = self._start(self.agent, node, 0, "agent")
        node.workers = [
            self._start(self.command, node, local, f"worker-{local}") for local in range(self.nproc_per_node)
        ]

    def _start(self, command: Sequence[str], node: Node, local: int, role: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "NEURON_RT_VISIBLE_CORES": str(node.node * self.nproc_per_node + local),
            **self.environment,
            launched.CONTROLLER: f"127.0.0.1:{self.store.port}",
            launched.NODES: str(self.started),
            launched.DEVICES: str(self.nproc_per_node),
            launched.MEMBER: str(node.member),
            launched.NODE: str(node.node),
            launched.LOCAL: str(local),
            launched.ENGINE: "optimum_trn.elastic.training",
        }
        if self.fault_tolerance is not None:
            environment[launched.FAULT_TOLERANCE] = str(self.fault_tolerance)
        log = self.directory / f"node-{node.node}-{role}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, preexec_fn=_die_with(os.getpid())
            )
        self.journal.write("started", role=role, node=node.node, member=node.member, pid=process.pid)
        return process

    # ---- Membership -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Watch until no worker is left; 0 if those that were not lost have finished, else 1."""
        self.start()
        try:
            while any(not node.finished for node in self.nodes):
                self._step()
                time.sleep(POLL_SECONDS)
            self._record_commits()
            code = 0 if self.nodes else 1
            self.journal.write("ended", code=code, committed=int(self.store.get(COMMITTED)))
            return code
        finally:
            self.stop()

    def _step(self) -> None:
        """Notice who has been lost, who has come, and what has been done."""
        lost = [node for node in self.nodes if node.lost]
        for node in lost:
            codes = [worker.poll() for worker in node.workers]
            self.journal.write("lost", node=node.node, member=node.member, codes=codes, joined=node.joined)
            _end(node.workers, GRACE_SECONDS, signal.SIGKILL)
            self.nodes.remove(node)
        came = [node for node in self.nodes if not node.joined and self._is_present(node)]
        # The first generation waits for all that were started.
        complete = self.snapshot.generation > 0 or all(node.joined or node in came for node in self.nodes)
        renew = self.store.check([f"renew/{self.snapshot.generation}"])
        changed = any(node.joined for node in lost) or (bool(came) and complete) or renew
        if changed and complete and self.nodes:
            for node in came:
                node.joined = True
            self._publish()
        if any(node.finished for node in self.nodes):
            self._dismiss([node for node in self.nodes if not node.joined])
        else:
            for node in lost:
                self._restart(node)
        self._record_commits()
        if not self.active and self.store.check([f"active/{self.snapshot.generation}"]):
            self.active = True
            plan = self.store.get(f"active/{self.snapshot.generation}").decode()
            self.journal.write("active", generation=self.snapshot.generation, plan=json.loads(plan))

    def _is_present(self, node: Node) -> bool:
        return bool(self.store.check([f"present/{node.member}/{local}" for local in range(self.nproc_per_node)]))

    def _publish(self) -> None:
        members = [
            Member(node.member, node.node, tuple(worker.pid for worker in node.workers))
            for node in sorted(self.nodes, key=lambda node: node.member)
            if node.joined
        ]
        self.snapshot = Snapshot(self.snapshot.generation + 1, tuple(members))
        self.active = False
        text = self.snapshot.to_json()
        self.journal.write("prepared", **json.loads(text))
        self.store.set(f"snapshot/{self.snapshot.generation}", text)
        self.store.set(GENERATION, str(self.snapshot.generation))

    def _restart(self, lost: Node) -> None:
        if self.restarts_left == 0:
            if lost.agent is not None:
                _end([lost.agent], GRACE_SECONDS)
            return
        self.restarts_left -= 1
        node = Node(lost.node, self.next_member, agent=lost.agent)
        self.next_member += 1
        self.nodes.append(node)
        self._start_node(node)

    def _dismiss(self, late: Sequence[Node]) -> None:
        """Nodes that came back too late to be taken in are not waited for."""
        for node in late:
            self.journal.write("dismissed", node=node.node, member=node.member)
            processes = [*node.workers, node.agent] if node.agent is not None else node.workers
            _end(processes, GRACE_SECONDS, signal.SIGKILL)
            self.nodes.remove(node)

    def _record_commits(self) -> None:
        """The steps that were committed go into the journal, in order."""
        committed = int(self.store.get(COMMITTED))
        while self.journaled < committed:
            record = json.loads(self.store.get(f"record/{self.journaled}"))
            self.journal.write("committed", **record)
            self.journaled += 1

    def stop(self) -> None:
        """End every process that is left."""
        processes = [process for node in self.nodes for process in [*node.workers, node.agent] if process is not None]
        _end(processes, GRACE_SECONDS)
        self.journal.close()


def _die_with(parent: int) -> Any:
    """What a child runs before anything else: the kernel ends it when the process that started it does."""

    def prepare() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before that was said
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def _end(processes: Sequence[subprocess.Popen[bytes]], seconds: float, how: int = signal.SIGTERM) -> None:
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.send_signal(how)
    deadline = time.monotonic() + seconds
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
