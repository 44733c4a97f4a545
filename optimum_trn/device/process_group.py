"""Registers the c10d backend `neuron` (csrc/process_group.cpp) and builds its groups."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from optimum_trn.device import liveness, neuronlink
from optimum_trn.device.build import load_extension

NAME = "neuron"


def register() -> None:
    """Let `torch.distributed.init_process_group("neuron")` find the backend; it is the default for neuron tensors."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["neuron", "cpu"])


def create(options: Any, _: Any = None) -> Backend:
    """One group's backend on this rank: NeuronLink in a host, gloo otherwise; a member's death fails it everywhere."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    liveness.announce(store, rank)
    gloo = dist.ProcessGroupGloo(store, rank, size, _gloo_options(timeout))
    # Or a rank that is done at once would close connections that others are still making.
    gloo.barrier().wait()  # type: ignore[attr-defined]
    extension = load_extension()
    group: Backend = extension.ProcessGroupNeuron(gloo, store, neuronlink.connect(store, rank, size))
    group.state.ranks = list(options.global_ranks_in_group) or list(range(size))  # type: ignore[attr-defined]
    liveness.watch(store, size, group.state)  # type: ignore[attr-defined]
    return group


def _gloo_options(timeout: timedelta) -> Any:
    """gloo listens where the other hosts can reach this one; left alone, where the host's own name points: often home.

    An interface that the user names in GLOO_SOCKET_IFNAME is gloo's to find.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=liveness.local_host())]
    return options
