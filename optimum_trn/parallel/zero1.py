"""ZeRO-1: the states of any torch optimizer, and float32 master weights, cut over the data-parallel ranks.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054),
stage 1: gradients are reduce-scattered, each rank updates its own part of the weights, and all gather the result.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimum_trn.errors import CheckpointError
from optimum_trn.parallel.arrivals import Arrival
from optimum_trn.parallel.buckets import (
    BUCKET_BYTES,
    Bucket,
    ByParameters,
    Layout,
    Span,
    by_elements,
    make_buckets,
    spans_of,
)
from optimum_trn.parallel.gradients import Scattered
from optimum_trn.parallel.granularity import Granularity, granularity_of
from optimum_trn.parallel.wrapped_optimizer import WrappedOptimizer

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Zero1Optimizer(WrappedOptimizer):
    """Wraps an optimizer, whose parameters become this rank's parts of the model's; its groups and options stay.

    An optimizer that works element by element gets equal runs of the concatenated parameters, so that its states take
    1/ranks of their memory; one that needs whole parameters (Adafactor, Muon) gets whole ones, shared out evenly. Which
    it is, is tried out: see granularity.py. A part of a bfloat16 or float16 parameter is a float32 master weight, and
    its gradients accumulate and are reduced in float32. Parts of other parameters share their memory.

    With `memory`, parts and states lie there instead, in the host's memory say, and are updated there (ZeRO-Offload:
    Ren et al. 2021, arXiv:2101.06840): reduced gradients leave for it during the backward pass, bucket by bucket, and
    new weights come back with the gathers.

    `parameters` are those of the model, by name: all that require a gradient, and all that the optimizer holds. Their
    gradients are in `reducer.gradients` after `reducer.finish()`, until `step` has used them. `others`, such as
    experts, are cut over the ranks of a group of their own, and have a reducer of their own in `reducers`.
    The parameters that `step` has updated arrive while the next forward pass runs, which waits for each bucket where it
    first reads one of them; so does everyone else (see arrivals.py). `settle` waits for all.
    Raises ValueError for an optimizer that needs all parameters at once, by its name.
    """

    overlaps: bool = True
    """Whether parameters may arrive after `step`; a compiled forward pass can't wait for them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        divisor: int,
        bucket_bytes: int = BUCKET_BYTES,
        others: Sequence[tuple[Mapping[str, nn.Parameter], dist.ProcessGroup]] = (),
        memory: torch.device | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.memory = memory
        self.parameters = {**parameters, **{name: p for more, _ in others for name, p in more.items()}}
        families = [(parameters, group), *others]
        is_cut = any(dist.get_world_size(ranks) > 1 for _, ranks in families)
        granularity = granularity_of(optimizer) if is_cut else Granularity.ELEMENT
        if granularity is Granularity.MODEL:
            raise ValueError(
                f"{type(optimizer).__name__} can't be sharded over data-parallel ranks: it updates a parameter by what "
                "it knows of others, or could not be tried on small ones. Set zero_1=False, which keeps the whole "
                "optimizer on every rank."
            )
        whole = granularity is Granularity.PARAMETER
        self._accumulate_in_float32()
        self.reducers = []
        for family, ranks in families:
            layout: Layout = ByParameters() if whole else by_elements
            buckets = make_buckets(family, dist.get_world_size(ranks), layout, bucket_bytes)
            self.reducers.append(Scattered(family, ranks, divisor, buckets, memory))
        self.reducer = self.reducers[0]
        self._take_parts(span for reducer in self.reducers for span in spans_of(reducer.buckets, reducer.rank))

    def has_copy_of(self, parameter: Tensor) -> bool:
        """Whether the part of a parameter of the model is a copy: a float32 master weight, or in another memory."""
        return parameter.dtype in LOW_PRECISION or self.memory is not None

    def _copied(self, values: Tensor) -> Tensor:
        dtype = torch.float32 if values.dtype in LOW_PRECISION else values.dtype
        return values.to(self.memory or values.device, dtype, copy=True)

    def _accumulate_in_float32(self) -> None:
        for parameter in self.parameters.values():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
            if parameter.dtype in LOW_PRECISION and parameter.grad is None:
                parameter.grad_dtype = torch.float32

    def _take_parts(self, spans: Iterable[Span]) -> None:
        """Put these parts in the optimizer's groups where the parameters are, and cut their states."""
        self.parts: dict[Span, nn.Parameter] = {}
        self._arrivals: list[Arrival] = []
        weakref.finalize(self, _complete, self._arrivals)  # at exit, too: other ranks may still want this one's parts
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        own: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            own[span.name].append(span)
        for group in self.optimizer.param_groups:
            parts = []
            for parameter in group["params"]:
                state = self.optimizer.state.pop(parameter, None)
                for span in own[names[id(parameter)]]:
                    is_whole = span.length == parameter.numel()  # then in its shape, which some optimizers must see
                    values = self._values(span)
                    values = self._copied(values) if self.has_copy_of(parameter) else values
                    part = self.parts[span] = nn.Parameter(values.view_as(parameter) if is_whole else values)
                    parts.append(part)
                    if state is not None:
                        self.optimizer.state[part] = {
                            key: self._part_of(value, parameter, span, part) for key, value in state.items()
                        }
            group["params"] = parts
        self._versions = self._current_versions()

    def _current_versions(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self.parameters.items()}

    @staticmethod
    def _part_of(value: Any, parameter: nn.Parameter, span: Span, part: nn.Parameter) -> Any:
        """The part of a state that an optimizer kept of a whole parameter."""
        if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
            return value
        return value.reshape(-1).narrow(0, span.start, span.length).view_as(part).to(part.device, part.dtype)

    def _values(self, span: Span) -> Tensor:
        """The span in the model's parameter: a view."""
        return self.parameters[span.name].detach().view(-1).narrow(0, span.start, span.length)

    # ---- The step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update this rank's parts with the reduced gradients, and gather everyone's; the gradients are used up."""
        if closure is not None:
            raise ValueError(
                "An optimizer that is sharded over data-parallel ranks takes no closure; set zero_1=False."
            )
        self.settle()
        self._prepare({span: grad for reducer in self.reducers for span, grad in reducer.gradients.items()})
        self.optimizer.step()
        for reducer in self.reducers:
            for bucket in reversed(reducer.buckets):  # in the order in which forward needs them
                if not reducer.present.isdisjoint(bucket.names):
                    self._arrivals.append(self._gather(reducer, bucket))
        if not self.overlaps:
            self.settle()
        self.zero_grad()

    def _prepare(self, gradients: Mapping[Span, Tensor]) -> None:
        """Give the parts the weights as they are now, and their gradients."""
        for span, part in self.parts.items():
            parameter = self.parameters[span.name]
            if not self.has_copy_of(parameter):
                part.data = self._values(span).view_as(part)  # the model may have moved to another memory since
            elif parameter._version != self._versions[span.name]:
                part.copy_(self._values(span).view_as(part))  # someone else has written the weights since
            gradient = gradients.get(span)
            part.grad = None if gradient is None else gradient.view_as(part).to(part.device)

    def settle(self) -> None:
        """Wait until the model's parameters are those of the last step."""
        _complete(self._arrivals)

    def _gather(self, reducer: Scattered, bucket: Bucket) -> Arrival:
        """Have every rank's parts of a bucket on their way into the model's parameters."""
        parameters = [self.parameters[name] for name in bucket.names]
        chunk = torch.zeros(bucket.chunk, dtype=bucket.dtype, device=parameters[0].device)
        for span in bucket.spans:
            if span.rank == reducer.rank:
                part = self.parts.get(span)
                values = self._values(span) if part is None else part.view(-1)
                chunk.narrow(0, span.offset, span.length).copy_(values)
        flat = chunk.new_empty(bucket.num_ranks * bucket.chunk)
        work = dist.all_gather_into_tensor(flat, chunk, group=reducer.group, async_op=True)
        return Arrival(parameters, work, partial(self._receive, reducer.rank, bucket, flat))

    def _receive(self, rank: int, bucket: Bucket, flat: Tensor) -> None:
        for span in bucket.spans:
            if span.rank != rank or self.has_copy_of(self.parameters[span.name]):
                self._values(span).copy_(bucket.part(flat, span))
        self._versions |= {name: self.parameters[name]._version for name in bucket.names}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parts and of the model."""
        for reducer in self.reducers:
            reducer.clear()
        for part in self.parts.values():
            part.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters are shared out when the optimizer is prepared."""
        raise ValueError(
            "Parameters can't be added to an optimizer that is sharded over data-parallel ranks: add the group before "
            "training starts, or set zero_1=False."
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's states and copies of weights, and what they are parts of."""
        masters = {
            index: part.detach()
            for index, (span, part) in enumerate(self.parts.items())
            if self.has_copy_of(self.parameters[span.name])
        }
        spans = [tuple(span) for span in self.parts]
        return {**self.optimizer.state_dict(), "masters": masters, "spans": spans}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; `CheckpointError` if it is of another cut of the model."""
        spans = [tuple(span) for span in state_dict["spans"]]
        if spans != [tuple(span) for span in self.parts]:
            raise CheckpointError(
                f"The optimizer state is that of {len(spans)} parts of the model, but this rank's {len(self.parts)} "
                "parts are others: it was saved at another data-parallel layout, or of another model."
            )
        masters = state_dict["masters"]
        self.settle()
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k not in ("masters", "spans")})
        for index, part in enumerate(self.parts.values()):
            if index in masters:
                part.copy_(masters[index])
        self._versions = self._current_versions()


def _complete(arrivals: list[Arrival]) -> None:
    for arrival in arrivals:
        arrival.complete()
    arrivals.clear()
