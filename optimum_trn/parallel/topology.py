"""Where the ranks are: node, chip and core of each, and the links that the groups of a layout use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist

from optimum_trn.device.runtime import instance, logical_core_size
from optimum_trn.parallel.mesh import AXES, VIEWS, ParallelConfig

LINKS = ("core", "chip", "instance", "network")
"""Classes of links, fastest first: within a core, a chip, an instance (NeuronLink) and between instances (EFA)."""


@dataclass(frozen=True)
class Topology:
    """The node of every rank, in rank order, and how many of a node's consecutive ranks share a chip."""

    nodes: tuple[int, ...]
    cores_per_chip: int

    def core(self, rank: int) -> int:
        """The rank's core on its node: ranks take the cores of their node in order."""
        return self.nodes[:rank].count(self.nodes[rank])

    def chip(self, rank: int) -> int:
        """The rank's chip on its node."""
        return self.core(rank) // self.cores_per_chip

    def link(self, ranks: Sequence[int]) -> str:
        """The slowest of `LINKS` between any two of `ranks`."""
        if len(ranks) == 1:
            return "core"
        if len({self.nodes[rank] for rank in ranks}) > 1:
            return "network"
        return "chip" if len({self.chip(rank) for rank in ranks}) == 1 else "instance"


def launched_topology(world_size: int) -> Topology:
    """The topology of the processes of this job; before a process group exists, that of as many full instances.

    The node of a rank is what torchrun says, GROUP_RANK, which is its own for every rank: a collective, where the
    launcher started several nodes.
    """
    spec = instance()
    cores_per_chip = spec.chip.logical_cores(logical_core_size())
    node, node_size = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if dist.is_initialized() and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        nodes = [0] * world_size
        dist.all_gather_object(nodes, node)
        return Topology(tuple(nodes), cores_per_chip)
    if not dist.is_initialized():
        node_size = spec.num_cores(logical_core_size())
    return Topology(tuple(rank // node_size for rank in range(world_size)), cores_per_chip)


def groups_of(axes: Sequence[str], sizes: dict[str, int]) -> list[list[int]]:
    """The ranks of every group along `axes` of a mesh of `sizes` (by axis, in the order of `AXES`), in mesh order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(product(*(range(sizes[axis]) for axis in AXES))):
        key = tuple(place for axis, place in zip(AXES, coordinates, strict=True) if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def placement_summary(config: ParallelConfig, topology: Topology) -> str:
    """One line for each axis with more than one rank: its groups, and the slowest link that any of them uses."""
    world_size = len(topology.nodes)
    sizes = config.axis_sizes(world_size)
    nodes = len(set(topology.nodes))
    lines = [f"{world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"]
    for axis in (*AXES, *VIEWS):
        groups = groups_of(VIEWS.get(axis, (axis,)), sizes)
        if len(groups[0]) == 1 or (axis in VIEWS and sum(sizes[part] > 1 for part in VIEWS[axis]) < 2):
            continue
        link = max((topology.link(group) for group in groups), key=LINKS.index)
        inside = "across instances" if link == "network" else f"inside {'a' if link == 'chip' else 'an'} {link}"
        lines.append(f"  {axis}: {len(groups)} group{'s' if len(groups) > 1 else ''} of {len(groups[0])}, {inside}")
    return "\n".join(lines)


def placement_table(config: ParallelConfig, topology: Topology) -> str:
    """`placement_summary`, and where every rank is: node, chip, core, and its place along each axis."""
    sizes = config.axis_sizes(len(topology.nodes))
    used = [axis for axis in AXES if sizes[axis] > 1]
    header = ["rank", "node", "chip", "core", *used]
    rows = [header]
    for rank, coordinates in enumerate(product(*(range(sizes[axis]) for axis in AXES))):
        places = dict(zip(AXES, coordinates, strict=True))
        where = [rank, topology.nodes[rank], topology.chip(rank), topology.core(rank)]
        rows.append([*map(str, where), *(str(places[axis]) for axis in used)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([placement_summary(config, topology), *table])
