"""Ranks that are threads of this process: sharded modules run as they are, one rank at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.errors import MeshError
from optimum_trn.parallel.mesh import RankGroup

T = TypeVar("T")


class SimulatedRanks:
    """`size` ranks that pass each other a baton at every collective, so that a run is the same each time.

    With `loses` set, every sum lacks what the last rank gives: the negative control of a proof.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self.loses = False
        self._start()

    def _start(self) -> None:
        self._turn = 0
        self._posted: list[list[Tensor]] = [[] for _ in range(self.size)]
        self._finished = [False] * self.size
        self._error: BaseException | None = None
        self._baton = threading.Condition()

    def groups(self) -> list[SimulatedGroup]:
        """The group as each of its ranks sees it."""
        return [SimulatedGroup(self, rank) for rank in range(self.size)]

    def run(self, function: Callable[[int], T]) -> list[T]:
        """What `function(rank)` returns on every rank; raises what the first rank raises that fails.

        `MeshError` if the ranks do not call the same collectives.
        """
        self._start()
        results: dict[int, T] = {}

        def work(rank: int) -> None:
            try:
                with self._baton:
                    self._wait_for(rank)
                results[rank] = function(rank)
            except BaseException as error:
                if self._error is None:
                    self._error = error
            with self._baton:
                self._finished[rank] = True
                self._turn = next((other for other, done in enumerate(self._finished) if not done), 0)
                self._baton.notify_all()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout)
        if self._error is not None:
            raise self._error
        if len(results) < self.size:
            raise MeshError(f"{self.size} simulated ranks have not finished within {self.timeout:.0f} s.")
        return [results[rank] for rank in range(self.size)]

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors that all ranks give to the collective which this rank calls now."""
        index = len(self._posted[rank])
        self._posted[rank].append(tensor.detach().clone())
        with self._baton:
            while behind := [other for other in range(self.size) if len(self._posted[other]) <= index]:
                if any(self._finished[other] for other in behind):
                    raise MeshError(f"Rank {rank} waits for ranks {behind} in a collective that they do not call.")
                self._turn = behind[0]
                self._baton.notify_all()
                self._wait_for(rank)
        tensors = [posted[index] for posted in self._posted]
        if len({given.shape for given in tensors}) > 1:
            raise MeshError(f"The ranks call one collective with shapes {[tuple(given.shape) for given in tensors]}.")
        return tensors

    def _wait_for(self, rank: int) -> None:
        while self._turn != rank:
            if self._error is not None or not self._baton.wait(self.timeout):
                raise MeshError("Another simulated rank failed.")
        if self._error is not None:
            raise MeshError("Another simulated rank failed.")


class SimulatedProcessGroup(dist.ProcessGroup):
    """The collectives that sharded modules use, among simulated ranks."""

    def __init__(self, ranks: SimulatedRanks, rank: int) -> None:
        super().__init__(rank, ranks.size)  # type: ignore[call-arg]
        self.ranks = ranks
        self.own_rank = rank

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Sums, or takes the maximum of, one tensor in place."""
        (tensor,) = tensors if isinstance(tensors, list) else [tensors]
        given = self.ranks.exchange(self.own_rank, tensor)
        if opts is not None and opts.reduceOp == dist.ReduceOp.MAX:
            tensor.copy_(torch.stack(given).amax(0))
            return None
        total = given[0].clone()
        for other in given[1 : -1 if self.ranks.loses else None]:
            total = total + other
        tensor.copy_(total)
        return None

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Gives every rank the tensors of all."""
        for output, given in zip(output_tensors[0], self.ranks.exchange(self.own_rank, input_tensors[0]), strict=True):
            output.copy_(given)
        return None


class SimulatedGroup(RankGroup):
    """A group of simulated ranks, for modules that hold one."""

    def __init__(self, ranks: SimulatedRanks, rank: int) -> None:
        self.process_group = SimulatedProcessGroup(ranks, rank)
        self.rank = rank
        self.size = ranks.size

    def among(self, ranks: Sequence[int]) -> RankGroup:
        """Not simulated: `MeshError`."""
        raise MeshError(f"Only all {self.size} simulated ranks make a group, not {list(ranks)}.")


class SimulatedMesh:
    """Stands for a device mesh where only its number of tensor-parallel ranks is asked for."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __getitem__(self, axis: str) -> SimulatedMesh:
        return self

    def size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.num_ranks
