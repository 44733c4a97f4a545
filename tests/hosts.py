"""Two hosts on one machine: network namespaces joined by a virtual cable, each with processes of its own.

    with two_hosts() as hosts:
        hosts.torchrun(script, "--option", processes_per_host=1)

Needs the rights to make network namespaces (root, as in most containers of CI); `unavailable()` says why they lack.
"""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ADDRESSES = ("10.203.0.1", "10.203.0.2")
TIMEOUT_SECONDS = 300.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Hosts:
    """The names of the two namespaces."""

    names: tuple[str, str]

    def torchrun(self, script: Path, *arguments: str, processes_per_host: int = 1, **environment: str) -> str:
        """Run `script` as one job of two nodes and return what the first node printed; AssertionError if it fails."""
        processes = []
        for node, name in enumerate(self.names):
            launcher = [
                *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(processes_per_host)),
                *("--master-addr", ADDRESSES[0], "--master-port", "29511"),
            ]
            search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
            processes.append(
                subprocess.Popen(
                    [*launcher, str(script), *arguments],
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "OPTIMUM_TRN_DEVICE": "neuron",
                        "PYTHONPATH": search_path,
                        **environment,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for node, process in enumerate(processes):
            assert process.returncode == 0, f"node {node} ended with {process.returncode}:\n{said[node][-5000:]}"
        return said[0]


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two namespaces that can reach each other at `ADDRESSES`, and nothing else."""
    tag = uuid.uuid4().hex[:6]
    names = (f"trn-{tag}-a", f"trn-{tag}-b")
    cables = (f"v{tag}a", f"v{tag}b")
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in made:
            ip("netns", "delete", name)


def unavailable() -> str | None:
    """Why there can't be two hosts on this machine, or None if there can."""
    try:
        with two_hosts() as hosts:
            ip("netns", "exec", hosts.names[0], "true")
    except FileNotFoundError:
        return "this machine has no `ip` command (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses network namespaces: {error.stderr.strip()}"
    return None
