"""The torch.compile backend `neuron`: PyTorch's own CPU code generator, run on zero-copy aliases of the core's tensors.

As on the hardware, graphs have static shapes and there is one mode (github.com/aws-neuron/aws-neuron-sdk, file
frameworks/torch/pytorch-native-overview.rst, 2026-08-21).
Nothing of the compiler is imported before torch.compile is used.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from optimum_trn.device.build import load_extension
from optimum_trn.errors import NeuronOutOfMemoryError

logger = logging.getLogger(__name__)

NAME = "neuron"
REGISTRY = "torch._dynamo.backends.registry"

Compiled = Callable[[list[Any]], Sequence[Any]]


def compile_model(graph: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What torch.compile(backend="neuron") calls with each captured graph.

    Raises ValueError for a mode or options: there are none. A graph with symbolic shapes runs uncompiled.
    """
    if options:
        asked = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(f"torch.compile(backend='neuron') has one mode and no options; leave out {asked}.")
    if any(_is_symbolic(value) for value in example_inputs):
        logger.warning(
            "A graph with symbolic shapes runs uncompiled: Neuron compiles one graph per shape. Pass dynamic=False to "
            "torch.compile, and pad batches to few shapes."
        )
        return graph.forward
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(fw_compiler=_compile_graph, decompositions=select_decomp_table)
    compiled: Callable[..., Any] = backend(graph, example_inputs)
    return compiled


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _compile_graph(graph: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """One forward or backward graph of ATen operators, as code for the CPU that fills the core's memory."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    on_cpu = _moved_to_cpu(graph, example_inputs)
    # Random numbers come from ATen, so that they can be drawn from the core's generator.
    with config.patch(fallback_random=True):
        compiled = compile_fx_inner(graph, on_cpu)
    draws_random_numbers = any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes
    )
    extension = load_extension()

    def run(arguments: list[Any]) -> list[Any]:
        originals = [value for value in arguments if isinstance(value, torch.Tensor)]
        aliases = [extension.to_cpu(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        arguments.clear()
        device = next((value.device.index for value in originals if value.device.type == "neuron"), -1)
        known = {
            id(alias): value
            for alias, value in zip((a for a in aliases if isinstance(a, torch.Tensor)), originals, strict=True)
        }
        kept = list(aliases)  # their identities must last until the outputs have been looked up
        with _RandomNumbersOfTheCore(draws_random_numbers):
            try:
                outputs = extension.run_on_core(compiled, aliases, device)
            except RuntimeError as error:
                if "HBM out of memory" in str(error):
                    raise NeuronOutOfMemoryError(f"{error} It happened inside a compiled graph.") from error
                raise
        results = [
            known.get(id(value), extension.from_cpu(value, device) if _is_new(value, known) else value)
            for value in outputs
        ]
        del kept
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_new(value: Any, known: dict[int, torch.Tensor]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) not in known


def _moved_to_cpu(graph: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Change the graph and its fake inputs from the core to the CPU, in place; returns the inputs."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    fake_mode = detect_fake_mode(example_inputs)
    cpu = torch.device("cpu")
    for node in graph.graph.nodes:
        device = node.kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "neuron":
            node.kwargs = {**node.kwargs, "device": cpu}
        node.args = torch.fx.node.map_aggregate(
            node.args, lambda value: cpu if isinstance(value, torch.device) and value.type == "neuron" else value
        )
    assert fake_mode is not None, "torch.compile passes fake inputs"
    with fake_mode:
        inputs = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=cpu)
            if isinstance(value, torch.Tensor)
            else value
            for value in example_inputs
        ]
    FakeTensorProp(graph, fake_mode).propagate_dont_convert_inputs(*inputs)
    return inputs


class _RandomNumbersOfTheCore:
    """While active, CPU kernels draw from a seed that the core's generator gave; the CPU's own state is untouched."""

    def __init__(self, active: bool):
        self.active = active

    def __enter__(self) -> None:
        if self.active:
            seed = int(torch.randint(1 << 62, (1,), device="neuron"))
            self.state = torch.get_rng_state()
            torch.default_generator.manual_seed(seed)

    def __exit__(self, *_: object) -> None:
        if self.active:
            torch.set_rng_state(self.state)


def register(registry: Any) -> None:
    """Add the backend to torch.compile's registry, which `device/install.py` passes once it is imported."""
    if NAME not in registry._BACKENDS:  # list_backends() would import what is being imported
        registry.register_backend(compiler_fn=compile_model, name=NAME)
