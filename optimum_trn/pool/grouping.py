"""Which consecutive layers a model is moved in: groups that keep the network, the copy to the device and compute busy.

A group passes three stages one after the other, and each stage takes one group at a time. After group i of s bytes

    n_i = n_{i-1} + a_n + s / B_n                 it has come over the network,
    h_i = max(n_i, h_{i-1}) + a_h + s / B_h       it is on the device,
    c_i = max(h_i, c_{i-1}) + compute             its layers have run.

Few groups wait for each other, many pay the latency a_n of each message. The three-stage pipeline is that of
DistMind (IEEE/ACM Transactions on Networking, 2024); that the partition is optimal, and the search for it, are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Layer(NamedTuple):
    """What is moved and run together at the least: bytes, and seconds of compute."""

    size: float
    compute: float


class Stages(NamedTuple):
    """Bandwidths in bytes per second and latencies in seconds of the two transfers."""

    network_bandwidth: float
    copy_bandwidth: float
    network_latency: float = 0.0
    copy_latency: float = 0.0


class Progress(NamedTuple):
    """When the stages are done with the groups so far, in seconds."""

    network: float = 0.0
    copy: float = 0.0
    compute: float = 0.0

    def after(self, group: Layer, stages: Stages) -> Progress:
        """With one group more."""
        network = self.network + stages.network_latency + group.size / stages.network_bandwidth
        copy = max(network, self.copy) + stages.copy_latency + group.size / stages.copy_bandwidth
        return Progress(network, copy, max(copy, self.compute) + group.compute)

    def dominates(self, other: Progress) -> bool:
        """Whether nothing that follows can end earlier after `other`."""
        return self.network <= other.network and self.copy <= other.copy and self.compute <= other.compute


def progress(groups: Sequence[Layer], stages: Stages) -> Progress:
    """When each stage has finished all groups; `.compute` is the time of load and forward."""
    done = Progress()
    for group in groups:
        done = done.after(group, stages)
    return done


def plan_groups(layers: Sequence[Layer], stages: Stages) -> list[int]:
    """How many layers each group takes, so that compute ends as early as any partition into groups allows.

    Exact: dynamic programming over the layers that are done, keeping all progress that no other dominates and that,
    if nothing waited from there on, would end before the best of some even partitions.
    """
    bound = min(progress(_evenly(layers, count), stages).compute for count in {1, 2, 4, 8, 16, 32, len(layers)})
    frontier: list[list[tuple[Progress, tuple[int, ...]]]] = [[(Progress(), ())]]
    sizes, computes = [0.0], [0.0]
    for layer in layers:
        sizes.append(sizes[-1] + layer.size)
        computes.append(computes[-1] + layer.compute)
    for end in range(1, len(layers) + 1):
        reached = []
        for start in range(end):
            group = Layer(sizes[end] - sizes[start], computes[end] - computes[start])
            reached += [(done.after(group, stages), (*plan, end - start)) for done, plan in frontier[start]]
        rest = Layer(sizes[-1] - sizes[end], computes[-1] - computes[end])
        frontier.append(_undominated([found for found in reached if _at_best(found[0], rest, stages) <= bound]))
    return list(min(frontier[-1], key=lambda found: (found[0].compute, len(found[1])))[1])


def early_groups(layers: Sequence[Layer], stages: Stages, slack: float = 0.02) -> list[int]:
    """The optimal plan, its groups cut further as long as compute ends at most a share `slack` later.

    Where the network is far slower than compute, few groups end as early as many, but many show their first layers, and
    what is wrong with them, sooner, and adapt to layers that take longer than was thought.
    """
    counts = plan_groups(layers, stages)
    limit = progress(grouped(layers, counts), stages).compute * (1 + slack)
    while max(counts) > 1:
        index = 0 if counts[0] > 1 else counts.index(max(counts))
        first = 1 if index == 0 else counts[index] // 2
        finer = [*counts[:index], first, counts[index] - first, *counts[index + 1 :]]
        if progress(grouped(layers, finer), stages).compute > limit:
            break
        counts = finer
    return counts


def grouped(layers: Sequence[Layer], counts: Sequence[int]) -> list[Layer]:
    """The groups that take so many layers each."""
    ends = accumulate(counts)
    parts = [layers[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [Layer(sum(one.size for one in part), sum(one.compute for one in part)) for part in parts]


def equal_groups(layer: Layer, count: int) -> list[Layer]:
    """A model as `count` groups of the same size."""
    return [Layer(layer.size / count, layer.compute / count)] * count


def _evenly(layers: Sequence[Layer], count: int) -> list[Layer]:
    """Layers in at most `count` groups of about as many."""
    length = max(1, -(-len(layers) // count))
    return grouped(layers, [min(length, len(layers) - start) for start in range(0, len(layers), length)])


def _at_best(done: Progress, rest: Layer, stages: Stages) -> float:
    """When compute would end if what is left never waited for another stage; a little less, for rounding."""
    copied = max(done.copy + rest.size / stages.copy_bandwidth, done.network + rest.size / stages.network_bandwidth)
    return max(done.compute + rest.compute, copied) * (1 - 1e-12)


def _undominated(reached: list[tuple[Progress, tuple[int, ...]]]) -> list[tuple[Progress, tuple[int, ...]]]:
    kept: list[tuple[Progress, tuple[int, ...]]] = []
    for done, plan in sorted(reached, key=lambda found: (found[0], len(found[1]))):
        if not any(other.dominates(done) for other, _ in kept):
            kept.append((done, plan))
    return kept
