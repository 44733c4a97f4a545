"""Random numbers that differ between the ranks of a group, drawn where activations are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimum_trn.parallel.mesh import RankGroup


@contextmanager
def rank_random(group: RankGroup, device: torch.device) -> Iterator[None]:
    """Inside, this rank draws numbers of its own; outside, all ranks go on with the stream that they have in common.

    The stream of a rank starts from a number of the common one, so that there is no state beside the common one: to
    restore that one, as recomputation and resumed training do, is to repeat what was drawn here as well.
    """
    seed = int(torch.randint(2**62, ()))
    others = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices=others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed + group.rank)
        yield
