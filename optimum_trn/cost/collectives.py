"""What a collective takes, by algorithm and size, on the links that its ranks really have.

Rings inside a node, recursive halving and doubling between nodes, and the flat ring over everything: the cheapest is
taken, as the Neuron runtime does by size (SDK: neuron-runtime/about/collectives.rst). Latencies are in cores.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from optimum_trn.cost.cores import Machine


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: `size` of them, `per_node` on each node, `stride` cores apart on it.

    All cores of a node are in a group of this kind, so that groups share the node's links and network.
    """

    size: int
    per_node: int
    stride: int = 1

    @property
    def nodes(self) -> int:
        """How many nodes it spans."""
        return self.size // self.per_node


def group(machine: Machine, size: int, stride: int) -> Group:
    """The group of `size` ranks `stride` apart, ranks taking the cores of the nodes in order."""
    per_node = max(1, min(size, machine.num_cores // stride))
    while size % per_node:  # a group that does not divide into equal nodes uses the network more
        per_node -= 1
    return Group(size, per_node, stride)


def all_gather(size: float, ranks: Group, machine: Machine) -> float:
    """Seconds until each of `ranks` has all `size` bytes, of which it brought its part."""
    return _one_way(size, ranks, machine) + machine.latency.launch if ranks.size > 1 else 0.0


def reduce_scatter(size: float, ranks: Group, machine: Machine) -> float:
    """Seconds until each of `ranks` has the sum of its part of `size` bytes."""
    return all_gather(size, ranks, machine)


def all_reduce(size: float, ranks: Group, machine: Machine) -> float:
    """Seconds until each of `ranks` has the sum of all `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * _one_way(size, ranks, machine) + machine.latency.launch if ranks.size > 1 else 0.0


def all_to_all(size: float, ranks: Group, machine: Machine) -> float:
    """Seconds until each of `ranks` has its part of the `size` bytes of every other; the network carries the rest."""
    if ranks.size == 1:
        return 0.0
    inside = size * (ranks.per_node - 1) / ranks.size / ring_rate(machine, ranks.per_node, ranks.stride)
    outside = size * (ranks.size - ranks.per_node) / ranks.size / (_network(machine) / machine.num_cores)
    latency = _crossing(size, machine) if ranks.nodes > 1 else machine.latency.hop
    return machine.latency.launch + latency + max(inside, outside)


def send(size: float, distance: int, machine: Machine) -> float:
    """Seconds for `size` bytes to the core `distance` ranks away, while every core of the node does the same."""
    if distance >= machine.num_cores:
        return machine.latency.launch + _crossing(size, machine) + size / (_network(machine) / machine.num_cores)
    return machine.latency.launch + machine.latency.hop + size / ring_rate(machine, 2, distance)


def bus_bytes(size: float, ranks: int) -> float:
    """Bytes that pass through each rank in an all-reduce, as nccom-test and nccl-tests count its bus bandwidth."""
    return 2 * (ranks - 1) / ranks * size


def _one_way(size: float, ranks: Group, machine: Machine) -> float:
    """A reduce-scatter or an all-gather, without its start."""
    inside, nodes = ranks.per_node, ranks.nodes
    rate = ring_rate(machine, inside, ranks.stride) if inside > 1 else math.inf
    if nodes == 1:
        return (inside - 1) * machine.latency.hop + size * (inside - 1) / inside / rate
    sharing = machine.num_cores // inside  # groups that send and receive at the same time
    network = _network(machine) / sharing
    crossings = math.ceil(math.log2(nodes)) if machine.latency.recursive else nodes - 1
    across = crossings * _crossing(size, machine) + size * (nodes - 1) / nodes / network
    hierarchical = across + (inside - 1) * machine.latency.hop + size * (inside - 1) / inside / rate
    flat = (ranks.size - 1) * machine.latency.hop + (nodes - 1) * _crossing(size, machine)
    flat += size * (ranks.size - 1) / ranks.size / min(rate, network)
    return min(hierarchical, flat)


def _network(machine: Machine) -> float:
    return machine.network_bytes_per_second * machine.latency.network_share


def _crossing(size: float, machine: Machine) -> float:
    smallest, growth, largest = machine.latency.crossing
    return min(largest, smallest + growth * math.log2(max(size, 8.0) / 8.0))


@lru_cache(maxsize=4096)
def ring_rate(machine: Machine, ranks: int, stride: int) -> float:
    """Bytes a second through each core of a ring of `ranks` cores `stride` apart, all such rings of the node at work.

    On a torus the rings share links: each hop takes the shortest way, rows first, and the fullest link decides.
    """
    if machine.torus is None or machine.num_chips == 1:
        return machine.ring_bytes_per_second
    loads: dict[tuple[int, int], int] = {}
    block = ranks * stride
    for first in range(machine.num_cores // block * stride):
        start = first // stride * block + first % stride
        chips = [(start + place * stride) // machine.cores_per_chip for place in range(ranks)]
        for here, there in _hops(tuple(dict.fromkeys(chips)), machine.torus):
            for link in _way(here, there, machine.torus):
                loads[link] = loads.get(link, 0) + 1
    if not loads:
        return machine.ring_bytes_per_second
    # All chips of a torus lie on two rings that share no link; those of one row or column on one.
    rings = 2 if ranks * stride == machine.num_cores and stride == 1 and min(machine.torus) > 2 else 1
    return rings * min(machine.ring_bytes_per_second, machine.link_bytes_per_second / max(loads.values()))


def _hops(chips: tuple[int, ...], torus: tuple[int, int]) -> list[tuple[int, int]]:
    """The hops of a ring over chips: rows are gone through alternately, so that each hop reaches a neighbour."""
    rows: dict[int, list[int]] = {}
    for chip in chips:
        rows.setdefault(chip // torus[1], []).append(chip)
    order: list[int] = []
    if len(rows) > 2 and all(len(row) == torus[1] for row in rows.values()):
        # Down the first column last, which closes the ring between neighbours.
        for index, row in enumerate(rows.values()):
            order += row[1:] if index % 2 == 0 else row[:0:-1]
        order += [row[0] for row in reversed(list(rows.values()))]
    else:
        for index, row in enumerate(rows.values()):
            order += row if index % 2 == 0 else row[::-1]
    return [(here, order[(place + 1) % len(order)]) for place, here in enumerate(order)] if len(order) > 1 else []


def _way(here: int, there: int, torus: tuple[int, int]) -> list[tuple[int, int]]:
    """The links from one chip to another on the torus, along the row first."""
    rows, columns = torus
    row, column = divmod(here, columns)
    links = []
    for axis, target, length in ((1, there % columns, columns), (0, there // columns, rows)):
        at = column if axis else row
        while at != target:
            step = 1 if (target - at) % length <= length // 2 else -1
            after = (at + step) % length
            before_chip, after_chip = (
                (row * columns + at, row * columns + after)
                if axis
                else (at * columns + column, after * columns + column)
            )
            links.append((before_chip, after_chip))
            at = after
        row, column = (row, target) if axis else (target, column)
    return links
