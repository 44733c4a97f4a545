"""Compares one training step and all outputs of a patched class with its stock self, on every rank."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from optimum_trn.errors import PlanError
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


@dataclass
class Expected:
    """What the stock model computes, which the patched ones are held to: computed once, on the first rank.

    `gradients` are None where a parameter gets none; `outputs` are those of evaluation with eager attention.
    """

    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor | None]
    input_gradients: dict[str, Tensor | None]
    outputs: dict[str, Tensor]
    options: dict[str, bool]

    @classmethod
    def of(cls, stock: PreTrainedModel, inputs: dict[str, Any]) -> Expected:
        """Of a model in training mode, which is left in evaluation."""
        loss = loss_of(stock.train()(**inputs))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
        norm = torch.nn.utils.get_total_norm([grad for grad in gradients.values() if grad is not None])
        evaluate(stock)
        options = dict(output_hidden_states=True, output_attentions=True)
        with torch.no_grad():
            try:
                outputs = tensors(stock(**without_labels(inputs), **options))
            except TypeError:
                options = {}
                outputs = tensors(stock(**without_labels(inputs)))
        input_gradients = {name: leaf.grad for name, leaf in leaves(inputs).items()}
        return cls(loss.detach(), norm, gradients, input_gradients, outputs, options)


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of an evaluation."""
    return {name: value for name, value in inputs.items() if "label" not in name and "positions" not in name}


def evaluate(model: PreTrainedModel) -> None:
    """Evaluation with the attention that gives its weights, if the model has it."""
    model.eval()
    try:
        model.set_attn_implementation("eager")
    except (ValueError, NotImplementedError):
        pass


class Proof:
    """One class of a model type, and what its stock self computes, to be compared with any layout of it."""

    def __init__(self, model_type: str, kind: str | None = None, **overrides: Any) -> None:
        self.kind = kind or main_kind(model_type)
        self.is_main = self.kind == main_kind(model_type)
        self.stock = tiny_class(model_type, self.kind, **overrides)
        self.inputs = class_batch(self.stock, self.kind)
        expected: list[Any] = [None]
        if dist.get_rank() == 0:
            with KeepFloat64():
                expected[0] = Expected.of(copy.deepcopy(self.stock), self.inputs)
        dist.broadcast_object_list(expected, src=0)
        self.expected: Expected = expected[0]

    def of(self, config: ParallelConfig, mesh: DeviceMesh, control: bool = False) -> dict[str, Any]:
        """Largest relative error of loss, gradient norm, every gradient and every output, and where it is.

        `sharded` is the fraction of parameters that is local, and `control` what a lost partial sum of each row-wise
        layer changes at least, if it is asked for; once a family is enough, since all its classes have the same layers.
        """
        expected, errors = self.expected, {}
        patched = copy.deepcopy(self.stock)
        report = patch_model(patched, config, mesh)
        patched.to(local_device())
        state = state_of(patched)
        assert state is not None
        inputs = {name: to_device(value) for name, value in self.inputs.items()}
        with KeepFloat64():
            loss = loss_of(patched.train()(**inputs))
            loss.backward()
            errors["loss"] = relative(loss, expected.loss)
            for name, gradient in expected.gradients.items():
                grad = patched.get_parameter(name).grad
                assert (grad is None) == (gradient is None), name
                if grad is not None and gradient is not None:
                    whole = unshard_from_group(grad, state.placements[name], state.tp_group)
                    errors[f"gradient of {name}"] = relative(whole, gradient)
            for name, gradient in expected.input_gradients.items():
                errors[f"gradient of input {name}"] = relative(leaves(inputs)[name].grad, gradient)
            norm = grad_norm(patched.named_parameters(), state.placements, state.tp_group)
            errors["norm"] = relative(norm, expected.norm)
            evaluate(patched)
            inputs = {name: to_device(value) for name, value in without_labels(self.inputs).items()}
            with torch.no_grad():
                outputs = tensors(patched(**inputs, **expected.options))
            assert outputs.keys() == expected.outputs.keys()
            for name, value in expected.outputs.items():
                assert outputs[name].shape == value.shape, (name, outputs[name].shape, value.shape)
                errors[f"output {name}"] = relative(outputs[name], value)
            lost = lost_sums(patched, inputs, outputs) if control and self.is_main else float("nan")
        worst = max(errors, key=errors.get)  # type: ignore[arg-type]
        return {
            "error": errors[worst],
            "worst": worst,
            "control": lost,
            "sharded": report.local_parameters / report.total_parameters,
            "outputs": len(expected.outputs),
        }


def proof(
    rank: int,
    world_size: int,
    model_type: str,
    kind: str | None,
    tensor_parallel_size: int,
    sequence_parallel: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """The proof of one class at one layout, with its negative control."""
    config = ParallelConfig(tensor_parallel_size, sequence_parallel)
    return Proof(model_type, kind, **overrides).of(config, config.build_mesh(), control=True)


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
) -> dict[str, dict[str, Any]]:
    """The proof of every class of a model type."""
    config = ParallelConfig(tensor_parallel_size)
    mesh = config.build_mesh()
    return {kind: Proof(model_type, kind, **overrides).of(config, mesh, control=True) for kind in kinds(model_type)}


def layouts(rank: int, world_size: int, model_types: list[str], every_class: bool) -> dict[str, dict[str, Any]]:
    """By type, class and layout: proofs of several types over all ranks, without and with sequence parallelism.

    Of each type the main class, or `every_class`; sequence parallelism of the main class only, or why it is refused.
    """
    whole, shared = ParallelConfig(world_size), ParallelConfig(world_size, sequence_parallel=True)
    mesh = whole.build_mesh()
    results: dict[str, dict[str, Any]] = {}
    for model_type in model_types:
        for kind in kinds(model_type) if every_class else [main_kind(model_type)]:
            one = Proof(model_type, kind)
            results[f"{model_type} {kind}"] = one.of(whole, mesh, control=world_size == 2)
            if one.is_main:
                try:
                    results[f"{model_type} {kind} sequence"] = one.of(shared, mesh)
                except PlanError as error:
                    results[f"{model_type} {kind} sequence"] = {"refused": str(error)}
        gc.collect()
    return results
