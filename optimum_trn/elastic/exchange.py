"""Copies of state between ranks: trees of tensors, every pair of ranks at the same time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from optimum_trn.elastic.reconfigure import Copy
from optimum_trn.parallel.transfers import TensorSpec, specs_of


def exchange(rank: int, planned: Sequence[Copy], state_of: Callable[[str], Any]) -> Mapping[str, Any]:
    """Send what this rank has and get what it lacks, as planned; the pieces that came, with tensors on the CPU.

    A collective over the ranks that are sources or targets, in the default process group.  All copies are on their way
    at once; what is in them is said before, since the receiver knows nothing of it.
    """
    mine = [copy for copy in planned if rank in (copy.source, copy.target)]
    works: list[Any] = []
    keep: list[Tensor] = []
    sending: dict[int, list[Tensor]] = {}
    specs: dict[int, Any] = {}
    for place, copy in enumerate(mine):
        if copy.source != rank:
            continue
        state = state_of(copy.piece)
        leaves = [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, Tensor)]
        sending[place] = [leaf.detach().cpu().contiguous() for leaf in leaves]
        text = torch.frombuffer(bytearray(pickle.dumps(specs_of(state))), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            keep.append(tensor)
            works.append(dist.isend(tensor, copy.target))
    for place, copy in enumerate(mine):
        if copy.target == rank:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, copy.source)
            text = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(text, copy.source)
            specs[place] = pickle.loads(text.numpy().tobytes())
    received: dict[str, Any] = {}
    for place, copy in enumerate(mine):
        if copy.source == rank:
            works += [dist.isend(tensor, copy.target) for tensor in sending[place]]
            continue
        leaves, structure = tree_flatten(specs[place], is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, TensorSpec):
                leaves[index] = torch.empty(leaf.shape, dtype=leaf.dtype)
                works.append(dist.irecv(leaves[index], copy.source))
        received[copy.piece] = tree_unflatten(leaves, structure)
    for work in works:
        work.wait()
    return received
