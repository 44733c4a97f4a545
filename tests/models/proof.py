"""Compares one training step and all outputs of a patched class with its stock self, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimum_trn.parallel import ParallelConfig, grad_norm
from optimum_trn.parallel.collectives import unshard_from_group
from optimum_trn.patching import patch_model, state_of
from tests.devices import local_device
from tests.models.families import class_batch, kinds, tiny_class
from tests.models.parity import relative
from tests.models.tiny import KeepFloat64


def to_device(value: Any) -> Any:
    """The same input on this rank's device, a leaf of its own if it takes a gradient."""
    if isinstance(value, tuple):
        return tuple(map(to_device, value))
    return value.detach().to(local_device(), copy=True).requires_grad_(value.requires_grad)


def leaves(inputs: Any) -> dict[str, Tensor]:
    """The inputs that take a gradient, by name."""
    items = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    found: dict[str, Tensor] = {}
    for name, value in items:
        if isinstance(value, tuple):
            found |= {f"{name}.{key}": leaf for key, leaf in leaves(value).items()}
        elif value.requires_grad:
            found[str(name)] = value
    return found


def loss_of(outputs: Any) -> Tensor:
    """The loss of a class that has one, else a scalar to which every entry of its floating outputs contributes."""
    if outputs.get("loss") is not None:
        return outputs.loss
    total = 0.0
    for name, tensor in tensors(outputs).items():
        generator = torch.Generator().manual_seed(len(name))
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
        total = total + (tensor * weights).mean()
    return total


def tensors(outputs: Any, prefix: str = "") -> dict[str, Tensor]:
    """All floating tensors of a model's outputs, by name; caches hold only this rank's heads and are left out."""
    found: dict[str, Tensor] = {}
    items = outputs.items() if hasattr(outputs, "items") else enumerate(outputs)
    for name, value in items:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[f"{prefix}{name}"] = value
        elif (isinstance(value, (tuple, list)) or hasattr(value, "to_tuple")) and name not in (
            "past_key_values",
            "cache",
        ):
            found |= tensors(value, f"{prefix}{name}.")
    return found


def main_kind(model_type: str) -> str:
    """The kind after the base model, if there is one: a language model where the family has one."""
    return kinds(model_type)[:2][-1]


def proof(
    rank: int,
    world_size: int,
    model_type: str,
    kind: str | None,
    tensor_parallel_size: int,
    sequence_parallel: bool = False,
    **overrides: Any,
) -> dict[str, float]:
    """Largest relative errors of loss, gradient norm, every gradient and every output; `control` is what a lost
    partial sum of each row-wise layer changes at least, and `sharded` the fraction of parameters that is local."""
    kind = kind or main_kind(model_type)
    stock = tiny_class(model_type, kind, **overrides)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, ParallelConfig(tensor_parallel_size, sequence_parallel))
    patched.to(local_device())
    state = state_of(patched)
    assert state is not None
    inputs = class_batch(stock, kind)
    local_inputs = {name: to_device(value) for name, value in inputs.items()}
    errors: dict[str, float] = {}
    with KeepFloat64():
        expected_loss = loss_of(stock.train()(**inputs))
        loss = loss_of(patched.train()(**local_inputs))
        expected_loss.backward()
        loss.backward()
        errors["loss"] = relative(loss, expected_loss)
        for name, expected in stock.named_parameters():
            grad = patched.get_parameter(name).grad
            assert (grad is None) == (expected.grad is None), name
            if grad is not None:
                whole = unshard_from_group(grad, state.placements[name], state.tp_group)
                errors[f"gradient of {name}"] = relative(whole, expected.grad)
        for name, expected in leaves(inputs).items():
            errors[f"gradient of input {name}"] = relative(leaves(local_inputs)[name].grad, expected.grad)
        norm = grad_norm(patched.named_parameters(), state.placements, state.tp_group)
        grads = [parameter.grad for parameter in stock.parameters() if parameter.grad is not None]
        errors["norm"] = relative(norm, torch.nn.utils.get_total_norm(grads))

        inputs = {name: value for name, value in inputs.items() if "label" not in name and "positions" not in name}
        local_inputs = {name: to_device(value) for name, value in inputs.items()}
        for model in (stock, patched):
            model.eval()
            try:
                model.set_attn_implementation("eager")
            except (ValueError, NotImplementedError):
                pass
        options = dict(output_hidden_states=True, output_attentions=True)
        try:
            with torch.no_grad():
                expected_outputs = tensors(stock(**inputs, **options))
        except TypeError:
            options = {}
            with torch.no_grad():
                expected_outputs = tensors(stock(**inputs))
        with torch.no_grad():
            outputs = tensors(patched(**local_inputs, **options))
        assert outputs.keys() == expected_outputs.keys()
        for name, expected in expected_outputs.items():
            assert outputs[name].shape == expected.shape, (name, outputs[name].shape, expected.shape)
            errors[f"output {name}"] = relative(outputs[name], expected)
        # Once a family is enough: the other classes have the same layers.
        control = lost_sums(patched, local_inputs, outputs) if kind == main_kind(model_type) else float("nan")
    worst = max(errors, key=errors.get)  # type: ignore[arg-type]
    return {
        "error": errors[worst],
        "worst": worst,
        "control": control,
        "sharded": report.local_parameters / report.total_parameters,
        "outputs": len(expected_outputs),
    }


@torch.no_grad()
def lost_sums(patched: Any, inputs: dict[str, Any], outputs: dict[str, Tensor]) -> float:
    """The least that any output changes by, over all row-wise layers, when the last rank's partial sum is lost."""
    least = float("inf")
    for module in patched.modules():
        weight = getattr(module, "down_proj", None) if "Experts" in type(module).__name__ else None
        if type(module).__name__.startswith("RowParallel"):
            weight = module.weight
        if not isinstance(weight, Tensor):
            continue
        kept = weight.detach().clone()
        if dist.get_rank() == dist.get_world_size() - 1:
            weight.zero_()
        changed = tensors(patched(**inputs))
        weight.copy_(kept)
        least = min(least, max(relative(changed[name], outputs[name].cpu()) for name in changed))
    return least


def proofs(
    rank: int, world_size: int, model_type: str, tensor_parallel_size: int, **overrides: Any
) -> dict[str, dict[str, float]]:
    """The proof of every class of a model type."""
    return {
        kind: proof(rank, world_size, model_type, kind, tensor_parallel_size, **overrides) for kind in kinds(model_type)
    }
