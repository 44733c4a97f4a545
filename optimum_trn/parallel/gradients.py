"""The gradient engine: reduces gradients over data-parallel ranks in buckets while backward still runs."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.parallel.buckets import BUCKET_BYTES, Bucket, Span, by_elements, make_buckets

IN_FLIGHT = 2
"""How many buckets may be under way at a time: each holds its gradients a second time over until it is reduced."""


@dataclass
class _Round:
    """One reduction of all gradients: what has not arrived, and what is under way."""

    missing: list[set[str]]
    present: dict[str, bool] = field(default_factory=dict)
    launched: list[tuple[Bucket, Tensor, Any]] = field(default_factory=list)


class GradientReducer(ABC):
    """Reduces the gradients of `parameters` over `group`: their sum over the ranks, divided by `divisor`.

    Between `begin` and `finish`, which stand around a backward pass, a bucket is sent when its last gradient has been
    accumulated and those before it are sent, so that all ranks send in the same order. A gradient counts as
    accumulated when the next one is, so that all hooks of the user on the parameter have run. Whatever has not been
    sent by `finish` is sent then: parameters that took no part, on this rank or on all, and gradients that no hook saw.
    Inside `no_sync` gradients only accumulate in `Parameter.grad`.

    A parameter without a gradient on some ranks counts as zero there; without one on all ranks it has none afterwards.
    `requires_grad` may change between backward passes, on all ranks alike.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, divisor: int) -> None:
        self.parameters = dict(parameters)
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.divisor = divisor
        self.buckets: tuple[Bucket, ...] = ()
        self._bucket_of: dict[str, int] = {}
        self._synchronizes = True
        self._round: _Round | None = None
        self._hooks: dict[str, Any] = {}
        self._trained: set[str] = set()  # what required a gradient in any pass since the last reduction

    # ---- What differs between the reductions ------------------------------------------------------------------------

    @abstractmethod
    def _start(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, Any]:
        """Start to reduce a buffer; the result, which is there once the work is done, and the work."""

    def _landed(self, result: Tensor) -> Tensor:
        """A reduced buffer where it stays until the backward pass is over."""
        return result

    @abstractmethod
    def _deliver(self, bucket: Bucket, result: Tensor, present: set[str]) -> None:
        """Put the reduced gradients of the parameters in `present` where they belong; the others have none."""

    @abstractmethod
    def _update_buckets(self) -> None:
        """Have buckets for the parameters in `_trained`."""

    # ---- Around a backward pass -------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on this rank; the first reduction after it reduces their sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def begin(self) -> None:
        """Call before a backward pass."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                self._trained.add(name)
                if name not in self._hooks:
                    # A parameter holds its hooks where the garbage collector does not look for cycles.
                    hook = partial(_tell, weakref.ref(self), name)
                    self._hooks[name] = parameter.register_post_accumulate_grad_hook(hook)
        if self._synchronizes:
            self._update_buckets()
            self._bucket_of = {name: n for n, bucket in enumerate(self.buckets) for name in bucket.names}
            trainable = {name for name in self._trained if self.parameters[name].requires_grad}
            self._round = _Round([trainable.intersection(bucket.names) for bucket in self.buckets])

    def finish(self) -> None:
        """Call after a backward pass: on return all gradients are reduced, outside `no_sync`."""
        if self._round is None:
            return
        current, self._round = self._round, None
        while len(current.launched) < len(self.buckets):
            self._launch(current)
        names = [name for bucket in self.buckets for name in bucket.names]
        if not names:
            return
        device = self.parameters[names[0]].device
        # Which parameters have a gradient on any rank: the optimizer must leave the others alone.
        bitmap = torch.tensor([int(current.present[name]) for name in names], dtype=torch.int32).to(device)
        dist.all_reduce(bitmap, op=dist.ReduceOp.MAX, group=self.group)
        present = {name for name, bit in zip(names, bitmap.tolist(), strict=True) if bit}
        for bucket, result, work in current.launched:
            if work is not None:
                work.wait()
                result = self._landed(result)
            self._deliver(bucket, result, present.intersection(bucket.names))
        self._trained = set()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}
        self._round = None

    def _arrived(self, name: str, parameter: Tensor) -> None:
        if not self._synchronizes:
            return
        if self._round is None:
            raise RuntimeError(
                "A gradient of a data-parallel model was computed outside of accelerator.backward(loss), which reduces "
                "it over the ranks. Call that in place of loss.backward()."
            )
        current, bucket = self._round, self._bucket_of[name]
        while len(current.launched) < len(self.buckets) and not current.missing[len(current.launched)]:
            self._launch(current)
        if bucket < len(current.launched):
            raise RuntimeError(
                f"{name} was given a second gradient after its first was sent: the backward pass goes through it in "
                "several parts, as with reentrant activation checkpointing of shared weights. Use "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        current.missing[bucket].discard(name)

    def _launch(self, current: _Round) -> None:
        """Send the next bucket."""
        bucket = self.buckets[len(current.launched)]
        grads = {name: self.parameters[name].grad for name in bucket.names}
        current.present |= {name: grad is not None for name, grad in grads.items()}
        trained = not self._trained.isdisjoint(bucket.names)
        length = bucket.num_ranks * bucket.chunk if trained else 0
        flat = torch.zeros(length, dtype=bucket.grad_dtype, device=self.parameters[bucket.names[0]].device)
        if not trained:
            current.launched.append((bucket, flat, None))
            return
        for span in bucket.spans:
            grad = grads[span.name]
            if grad is not None:
                bucket.part(flat, span).copy_(grad.detach().reshape(-1).narrow(0, span.start, span.length))
        for name in bucket.names:
            self.parameters[name].grad = None  # its memory is free while the buffer is under way
        # Before the sum, which could overflow otherwise.
        current.launched.append((bucket, *self._start(bucket, flat.div_(self.divisor))))
        if len(current.launched) > IN_FLIGHT:
            sent, result, work = current.launched[-1 - IN_FLIGHT]
            if work is not None:
                work.wait()
                current.launched[-1 - IN_FLIGHT] = (sent, self._landed(result), None)


def _tell(reducer: weakref.ref[GradientReducer], name: str, parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive._arrived(name, parameter)


class AllReduced(GradientReducer):
    """Data parallelism: `Parameter.grad` is the reduced gradient, a view of its bucket, on all ranks."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        divisor: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(parameters, group, divisor)
        self.bucket_bytes = bucket_bytes
        self._bucketed: list[str] = []

    def _update_buckets(self) -> None:
        wanted = [name for name in self.parameters if name in self._trained]
        if wanted != self._bucketed:
            self._bucketed = wanted
            self.buckets = make_buckets(
                {name: self.parameters[name] for name in wanted}, 1, by_elements, self.bucket_bytes
            )

    def _start(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, Any]:
        return flat, dist.all_reduce(flat, group=self.group, async_op=True)

    def _deliver(self, bucket: Bucket, result: Tensor, present: set[str]) -> None:
        for span in bucket.spans:
            if span.name in present:
                parameter = self.parameters[span.name]
                parameter.grad = bucket.part(result, span).view_as(parameter)


class Scattered(GradientReducer):
    """ZeRO-1: each rank is left with the reduced gradients of its own spans, in `gradients`, until they are cleared.

    They are in `memory`, if one is given: each bucket leaves for it while the backward pass computes the next ones.
    `present` names the parameters that have a gradient, on whatever rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        divisor: int,
        buckets: Sequence[Bucket],
        memory: torch.device | None = None,
    ) -> None:
        super().__init__(parameters, group, divisor)
        self.buckets = tuple(buckets)
        self.memory = memory
        self.gradients: dict[Span, Tensor] = {}
        self.present: set[str] = set()

    def clear(self) -> None:
        """Forget all gradients."""
        self.gradients, self.present = {}, set()

    def _update_buckets(self) -> None:
        """They are what the optimizer's parts are cut by, and stay."""

    def _start(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, Any]:
        chunk = flat.new_empty(bucket.chunk)
        return chunk, dist.reduce_scatter_tensor(chunk, flat, group=self.group, async_op=True)

    def _landed(self, result: Tensor) -> Tensor:
        return result.to(self.memory or result.device)

    def _deliver(self, bucket: Bucket, result: Tensor, present: set[str]) -> None:
        self.present |= present
        for span in bucket.spans:
            if span.rank == self.rank and span.name in present:
                gradient = result.narrow(0, span.offset, span.length)
                if span in self.gradients:  # not cleared: it accumulates, as Parameter.grad does
                    gradient = self.gradients[span].add_(gradient)
                self.gradients[span] = gradient
