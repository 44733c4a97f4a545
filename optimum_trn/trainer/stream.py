"""The rows of an iterable or dispatched data set that belong to one data-parallel rank, each row exactly once."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers.trainer_pt_utils import IterableDatasetShard


def _as_rows(rows: list[Any]) -> list[Any]:
    """The collate function of a loader whose rows are collated later, when they are cut."""
    return rows


class DataParallelStream(IterableDatasetShard):
    """Cuts global batches of raw rows into equal runs, one a data-parallel rank, before they are collated.

    Raw rows, because collated ones differ in length and could not be cut together. The last global batch is spread
    evenly too, completed with rows of the first so that all ranks have as many; `loader.remainder` then holds how many
    of its rows are real. With `dispatch` only rank 0 of the world reads, and sends to all ranks; without it every rank
    reads everything, which needs a data set that yields the same rows in the same order everywhere.

    A subclass of transformers' IterableDatasetShard so that Trainer counts examples through it (`num_examples`).
    """

    def __init__(
        self,
        loader: DataLoader,
        num_processes: int,
        process_index: int,
        split_batches: bool = False,
        dispatch: bool = True,
        data_seed: int | None = None,
    ) -> None:
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if batch_size is None:
            raise ValueError("A loader without batch_size can't be cut for data-parallel ranks: give it a batch_size.")
        if split_batches:
            if batch_size % num_processes:
                raise ValueError(
                    f"split_batches=True: the batch size {batch_size} is not a multiple of the {num_processes} "
                    "data-parallel ranks that share it."
                )
            batch_size //= num_processes
        dataset: Any = loader.dataset
        super().__init__(dataset, batch_size, bool(loader.drop_last), num_processes, process_index)
        self.dispatch = dispatch
        self.loader: Any = None
        self.rows: Any = copy.copy(loader)
        self.rows.collate_fn = _as_rows
        self.rows.pin_memory = False
        batch_sampler: Any = self.rows.batch_sampler
        sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
        if isinstance(sampler, RandomSampler):
            # As accelerate does for its own loaders: an order that follows from seed and epoch, so that it can resume.
            batch_sampler.sampler = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator,
                data_seed=data_seed,
            )

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set and its sampler which epoch comes, if they care."""
        super().set_epoch(epoch)
        sampler: Any = getattr(self.rows.batch_sampler, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.num_examples = 0
        generator = getattr(self.dataset, "generator", None)
        if not self.dispatch and isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)  # the same rows in the same order on all ranks
        first: list[Any] = []
        batch: list[Any] = []
        for batch in self._dispatched() if self.dispatch else self._read():
            first = first or batch
            self.num_examples += len(batch)
            rows = math.ceil(len(batch) / self.num_processes)
            filled = [*batch, *itertools.islice(itertools.cycle(first), rows * self.num_processes - len(batch))]
            yield from filled[self.process_index * rows : (self.process_index + 1) * rows]
        if self.loader is not None:
            self.loader.remainder = len(batch)

    def _read(self) -> Iterator[list[Any]]:
        """Global batches, the last one possibly short."""
        full = self.batch_size * self.num_processes
        buffer: list[Any] = []
        for rows in self.rows:
            buffer.extend(rows)
            while len(buffer) >= full:
                yield buffer[:full]
                buffer = buffer[full:]
        if buffer and not self.drop_last:
            yield buffer

    def _dispatched(self) -> Iterator[list[Any]]:
        """What rank 0 reads, on all ranks; a data set that raises there raises everywhere."""
        reader = self._read() if dist.get_rank() == 0 else iter(())
        while True:
            message: list[Any] = [None, None]
            try:
                message[0] = next(reader, None)
            except Exception as error:
                message[1] = error
            cause, text = message[1], message[1] and f"{type(message[1]).__name__}: {message[1]}"
            message[1] = text
            dist.broadcast_object_list(message, src=0)
            if message[1] is not None:
                raise RuntimeError(f"rank 0, which reads the data for all ranks, failed: {message[1]}") from cause
            if message[0] is None:
                return
            yield message[0]
