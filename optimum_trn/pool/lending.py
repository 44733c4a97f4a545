"""Cores on loan: a job waits for them, gives them back when another is more urgent, and goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import TrainerCallback

from ..checkpoint.agreement import agreed, of_first_rank
from ..errors import StoreError
from ..modeling import local_device
from ..store.client import StoreClient
from ..store.protocol import Operation
from .address import PoolAddress

POLL_SECONDS = 0.01
ROUND_SECONDS = 10.0


class CoreLease:
    """A lease of the pool's scheduler for all ranks of this job; the first rank speaks for them."""

    def __init__(self, job: str, cores: int, priority: int, preemptible: bool, address: PoolAddress | None) -> None:
        self.ask = {"job": job, "cores": cores, "priority": priority, "preemptible": preemptible}
        self.cores: tuple[int, ...] = ()
        self._client: StoreClient | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            address = address or PoolAddress.load()
            if address.scheduler is None:
                raise StoreError("This pool lends no cores: start it with `optimum-trn pool serve --cores N`.")
            self._client = StoreClient(*address.scheduler, address.token)

    def acquire(self) -> None:
        """Wait until the cores are granted, on all ranks."""
        with agreed("Asking for cores"):
            if self._client is not None:
                self._client.ask(Operation.ASK, self.ask)
        granted = None
        while granted is None:  # rounds, since ranks that wait for one collective wait as long as its timeout only
            with agreed("Waiting for cores"):
                granted = self._poll() if self._client is not None else None
            granted = of_first_rank(granted)
        self.cores = tuple(granted)

    def _poll(self) -> list[int] | None:
        """The cores, or None if they are not granted within a round."""
        assert self._client is not None
        end = time.monotonic() + ROUND_SECONDS
        while (granted := self._client.ask(Operation.LEASE, {})["cores"]) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return cast("list[int] | None", granted)

    def wanted(self) -> bool:
        """Whether another job is more urgent, the same on all ranks."""
        answer = self._client is not None and self._client.ask(Operation.LEASE, {})["wanted"]
        return bool(of_first_rank(answer))

    def give_back(self) -> None:
        """Let others have the cores."""
        if dist.is_initialized():
            dist.barrier()  # no rank computes any more
        if self._client is not None:
            self._client.ask(Operation.GIVE_BACK, {})
        self.cores = ()

    def close(self) -> None:
        """End the connection, and the lease with it."""
        if self._client is not None:
            self._client.close()


@contextmanager
def lease(
    cores: int,
    job: str = "job",
    priority: int = 0,
    preemptible: bool = False,
    address: PoolAddress | None = None,
) -> Iterator[DeviceMesh | CoreLease]:
    """`with lease(cores=2) as mesh:` waits for so many cores, one for each rank of this job, which all enter it.

    Gives the mesh ("dp",) of the ranks, or the lease itself in a job of one process, which has no mesh.  Raises
    `StoreError` if the job has another number of ranks, or the pool fewer cores.
    """
    with lend(cores, job, priority, preemptible, address) as held:
        yield init_device_mesh(local_device().type, (cores,), mesh_dim_names=("dp",)) if dist.is_initialized() else held


@contextmanager
def lend(
    cores: int,
    job: str = "job",
    priority: int = 0,
    preemptible: bool = False,
    address: PoolAddress | None = None,
) -> Iterator[CoreLease]:
    """As `lease`, but gives the `CoreLease`, which a `YieldCores` callback takes."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != cores:
        raise StoreError(
            f"A job of {ranks} ranks runs on {ranks} cores, not on {cores}: ask for as many, or launch it so."
        )
    held = CoreLease(job, cores, priority, preemptible, address)
    try:
        held.acquire()
        yield held
    finally:
        held.close()


class YieldCores(TrainerCallback):
    """Gives a Trainer's cores to more urgent jobs between two steps, and goes on as if nothing had been.

    Parameters, buffers, gradients, optimizer states and random states are copied to the host, the memory of the core
    is freed, and all is copied back when the cores are granted again; the position in the data stays in the process.
    `switches` holds the seconds of each way: (out, in).
    """

    def __init__(self, held: CoreLease) -> None:
        self.held = held
        self.switches: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the cores back if they are wanted, and wait for them."""
        if not self.held.wanted():
            return
        begin = time.perf_counter()
        suspended = Suspended(kwargs["model"], kwargs.get("optimizer"))
        self.held.give_back()
        out = time.perf_counter() - begin
        self.held.acquire()
        begin = time.perf_counter()
        suspended.resume()
        self.switches.append((out, time.perf_counter() - begin))


class Suspended:
    """The state of a training job in host memory; `resume` puts it back into the same tensors."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.device = local_device()
        self.random = (torch.get_rng_state(), _device_random(self.device))
        found = _storages([model.state_dict(keep_vars=True), list(model.parameters()), list(model.buffers())])
        while optimizer is not None:
            found |= _storages([optimizer.state, vars(optimizer)])
            optimizer = getattr(optimizer, "optimizer", None)
        self.held: list[tuple[torch.UntypedStorage, int, Tensor]] = []
        for storage in found.values():
            size = storage.nbytes()
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.held.append((storage, size, on_device.cpu()))
            del on_device
            storage.resize_(0)
        if self.device.type == "neuron":
            torch.neuron.empty_cache()  # type: ignore[attr-defined]

    def resume(self) -> None:
        """Everything is on the core again, as it was."""
        for storage, size, data in self.held:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(data)
        self.held = []
        torch.set_rng_state(self.random[0])
        if self.random[1] is not None:
            torch.neuron.set_rng_state(self.random[1])  # type: ignore[attr-defined]


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """The storages on the device of the tensors in a structure of dicts, lists and tuples, by their identity."""
    found: dict[int, torch.UntypedStorage] = {}
    stack, seen = [value], set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device.type not in ("cpu", "meta") and type(one) in (Tensor, nn.Parameter):
                storage = one.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage
            if one.is_leaf and one.grad is not None:
                stack.append(one.grad)
        elif isinstance(one, Mapping):
            stack.extend([*one.keys(), *one.values()])
        elif isinstance(one, list | tuple):
            stack.extend(one)
    return found


def _device_random(device: torch.device) -> Tensor | None:
    return torch.neuron.get_rng_state() if device.type == "neuron" else None  # type: ignore[attr-defined]
