"""One product of several linear layers that read the same input; their weights lie one after the other in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from optimum_trn.parallel.regather import Regathered, gathered_from


def packed(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The rows of all parameters as one tensor without gradient, over the storage that they share.

    Parameters that each own their storage, as when they are new or were moved, are given parts of a common one; they
    stay the same objects of the same shapes.  Those that someone else keeps together in another order are copied.
    """
    first = parameters[0]
    if not _adjacent(parameters):
        together = torch.cat([parameter.detach() for parameter in parameters])
        if any(parameter.is_meta or not _owns_storage(parameter) for parameter in parameters):
            return together
        parts = together.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    storage, offset = parameters[0].untyped_storage()._cdata, parameters[0].storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage()._cdata == storage and parameter.storage_offset() == offset
        if not same or not parameter.is_contiguous():
            return False
        offset += parameter.numel()
    return True


def _owns_storage(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def fused_linear(
    input: Tensor, parameters: Sequence[Sequence[nn.Parameter]], through: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """The outputs of several linear layers for an `input` of shape (..., in_features), of one product.

    `parameters` are all weights (out_features, in_features), and all biases if there are such; `through` are the same
    or views of them, through which their gradients go, which are those of separate layers.
    """
    weight, *biases = map(packed, parameters)
    sizes = [parameter.shape[0] for parameter in parameters[0]]
    input_as_given = input
    device = input.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight, biases = input.to(dtype), weight.to(dtype), [bias.to(dtype) for bias in biases]
    flat = [tensor for group in through for tensor in group]
    source = gathered_from(input_as_given) if any(tensor.requires_grad for tensor in flat) else None
    kept = None if source is None else source.run(input.dtype)
    whole = None if source is None else source.whole(input.dtype)
    output: Tensor = _FusedLinear.apply(input, kept, weight, biases[0] if biases else None, whole, sizes, *flat)
    return list(output.split(sizes, dim=-1))


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        run: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        whole: Regathered | None,
        sizes: list[int],
        *parameters: Tensor,
    ) -> Tensor:
        if whole is not None:
            whole.readers += 1
        ctx.save_for_backward(input if run is None else run, weight)
        ctx.whole, ctx.sizes, ctx.dtypes = whole, sizes, [parameter.dtype for parameter in parameters]
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        grad = grads[0]
        if ctx.whole is not None:
            ctx.whole.start(input)
        grad_input = grad @ weight if ctx.needs_input_grad[0] else None
        if ctx.whole is not None:
            input = ctx.whole.take()
        rows = grad.flatten(0, -2)
        parameters: list[Tensor | None] = [None] * len(ctx.dtypes)
        if any(ctx.needs_input_grad[6:]):
            own = [*(rows.t() @ input.flatten(0, -2)).split(ctx.sizes)]
            if len(ctx.dtypes) > len(own):
                own += rows.sum(0).split(ctx.sizes)
            parameters = [part.to(dtype) for part, dtype in zip(own, ctx.dtypes, strict=True)]
        return grad_input, None, None, None, None, None, *parameters
