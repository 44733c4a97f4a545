"""Random numbers that differ between the ranks of a group, drawn where activations are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from optimum_trn.parallel.mesh import RankGroup


class Generators:
    """The states of the generators of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: tuple[Tensor, ...] = ()
        self.keep()

    def keep(self) -> None:
        """Remember where the generators are."""
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        self.states = tuple(states)

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self.states[0])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(self.states[1], self.device)


_outside: list[Generators] = []  # of every `rank_random` that is active: where the generators go on after it


@contextmanager
def rank_random(group: RankGroup, device: torch.device) -> Iterator[None]:
    """Inside, this rank draws numbers of its own; outside, all ranks go on with the stream that they have in common.

    The stream of a rank starts from a number of the common one, so that there is no state beside the common one: to
    restore that one, as recomputation and resumed training do, is to repeat what was drawn here as well.
    """
    seed = int(torch.randint(2**62, ()))
    outside = Generators(device)
    _outside.append(outside)
    try:
        torch.manual_seed(seed + group.rank)
        yield
    finally:
        _outside.remove(outside)
        outside.restore()


@contextmanager
def common_random(device: torch.device) -> Iterator[None]:
    """Inside, even where ranks draw numbers of their own, they draw those of the stream that they have in common."""
    if not _outside:
        yield
        return
    own, common = Generators(device), _outside[0]
    common.restore()
    try:
        yield
    finally:
        common.keep()
        own.restore()
