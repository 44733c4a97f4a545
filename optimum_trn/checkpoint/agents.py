"""Where the agents of all nodes listen, and which of them hold what a rank has saved in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import CheckpointError
from ..store import StoreClient
from .placement import Placement, mixed_placement

AGENTS, TOKEN = "OPTIMUM_TRN_AGENTS", "OPTIMUM_TRN_AGENT_TOKEN"
"""Environment: host:port of the agent of every node, in the order of the nodes, and the token that all of them know."""
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Agents:
    """The agents of a job, by node, and the placement of copies on them; ranks are counted node by node."""

    addresses: tuple[tuple[str, int], ...]
    token: bytes
    placement: Placement
    ranks_per_node: int

    @classmethod
    def of_environment(cls, replicas: int, world_size: int) -> Agents:
        """As the launcher says; `CheckpointError` if it says nothing, or agents don't fit ranks and copies."""
        text = os.environ.get(AGENTS)
        if not text:
            raise CheckpointError(
                f"memory_checkpoint_replicas={replicas} needs an agent on every node: start `optimum-trn agent` on "
                f"each, and set {AGENTS}=host:port,host:port,... (in the order of the nodes) and {TOKEN} for all ranks."
            )
        addresses = []
        for entry in text.split(","):
            host, _, port = entry.strip().rpartition(":")
            if not host or not port.isdecimal():
                raise CheckpointError(f"{AGENTS}={text!r}: {entry!r} is no host:port of an agent.")
            addresses.append((host, int(port)))
        if world_size % len(addresses):
            raise CheckpointError(
                f"{world_size} ranks are not on {len(addresses)} nodes of the same size: {AGENTS} must list the agent "
                "of every node once."
            )
        placement = mixed_placement(len(addresses), replicas)
        return cls(tuple(addresses), token_of_environment(), placement, world_size // len(addresses))

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node

    def holders(self, rank: int) -> tuple[int, ...]:
        """The nodes that hold what a rank has saved, its own first."""
        return self.placement.holders(self.node_of(rank))

    def client(self, node: int) -> StoreClient:
        """A new connection to the agent of a node, which is made on first use."""
        host, port = self.addresses[node]
        return StoreClient(host, port, self.token, TIMEOUT_SECONDS)


def token_of_environment() -> bytes:
    """The token of the agents; `CheckpointError` without one."""
    text = os.environ.get(TOKEN, "")
    if len(text) < 32:
        raise CheckpointError(
            f"Agents and ranks need the same secret in {TOKEN}, of at least 32 characters: "
            "python -c 'import secrets; print(secrets.token_hex(32))' makes one."
        )
    return text.encode()
