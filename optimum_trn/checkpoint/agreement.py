"""Lets all ranks leave a step in the same way: where one fails, all fail, instead of waiting for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from ..errors import CheckpointError

T = TypeVar("T")


@contextmanager
def agreed(step: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that holds no collective, and find out on every rank of the world whether all came through it.

    A collective at the end of the block, over all ranks; in a thread it takes a `group` of its own of all of them.  A
    rank whose block raised raises that; the others raise `CheckpointError` with the ranks that failed and what the
    first of them said.  Alone, it is nothing.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if dist.is_initialized():
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, said, group=group)
        failed = [rank for rank, answer in enumerate(answers) if answer is not None]
        if failure is None and failed:
            ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
            raise CheckpointError(
                f"{step} failed on {ranks}, so this rank stops too. Rank {failed[0]} said: {answers[failed[0]]}"
            )
    if failure is not None:
        raise failure


def is_first_rank() -> bool:
    """Whether this process is alone, or the first of all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_first_on_host() -> bool:
    """Whether this process is alone, or the first that the launcher started on this host."""
    return not dist.is_initialized() or int(os.environ.get("LOCAL_RANK", "0")) == 0


def of_first_rank(content: T) -> T:
    """What the first rank has; a collective, unless this process is alone."""
    if not dist.is_initialized():
        return content
    found = [content]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def of_all_ranks(content: T) -> list[T]:
    """What each rank has, in their order; a collective, unless this process is alone."""
    if not dist.is_initialized():
        return [content]
    found = [content] * dist.get_world_size()
    dist.all_gather_object(found, content)
    return found
