"""The one door to other libraries' globals: PyTorch, accelerate and transformers see the simulated device through it.

`install` renames PyTorch's open device slot to `neuron`, makes `torch.neuron` and the package name `torch_neuronx`
discoverable (accelerate and transformers ask for both), registers the process group and the compiler backend, and adds
the device's random state to the checkpoints of `transformers.Trainer`, which saves that of other accelerators only.
"""

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from optimum_trn.device import compiler, process_group, runtime, saved_random_state
from optimum_trn.device.build import is_built, load_extension
from optimum_trn.device.saved_random_state import random_state_file

logger = logging.getLogger(__name__)

PACKAGE = "torch_neuronx"
TRAINER = "transformers.trainer"
ACCELERATOR = "accelerate.accelerator"
ACCELERATOR_STATE = "accelerate.state"
ACCELERATOR_IS_DEFINED = "accelerate.launchers"  # what accelerate imports next
ACCELERATE_CHECKS = "accelerate.utils.imports"
MODELS = "transformers.modeling_utils"
PATCH = "_optimum_trn_patch"
"""What a model has that processes share (`patching.state`), which nothing here may import."""
AVAILABILITY_CHECKS = {
    "accelerate.utils.imports": "is_neuron_available",
    "transformers.utils.import_utils": "is_torch_neuron_available",
}

_undo: list[Callable[[], None]] = []


def real_device_present() -> bool:
    """Whether the real Neuron device package is installed; then the simulator stays out of the way."""
    ours = sys.modules.get(PACKAGE)
    return getattr(ours, "simulated_by", None) is None and importlib.util.find_spec(PACKAGE) is not None


def installed() -> bool:
    """Whether accelerate and transformers see the simulated device now."""
    return bool(_undo)


def install(load: bool = True) -> None:
    """Make the simulated device known; with `load=False` an extension that is not compiled yet waits for the first use.

    Does nothing a second time, or where the real torch_neuronx is installed. Raises RuntimeError where another library
    holds PyTorch's open device slot, or where CUDA or PyTorch/XLA is in use already and would be chosen instead.
    """
    if installed() or real_device_present():
        return
    _hide_cuda()
    _hide_xla()
    _name_the_device()
    process_group.register()
    _announce_package()
    _forget_answers()
    _undo.append(_forget_answers)
    _after_import(compiler.REGISTRY, compiler.register)
    _after_import(ACCELERATE_CHECKS, _say_that_fp16_is_not_available)
    _after_import(ACCELERATOR_STATE, _refuse_mixed_precision_the_core_has_not)
    _after_import(ACCELERATOR, _refuse_models_that_processes_share)
    _after_import(MODELS, _refuse_kernels_of_other_vendors)
    _after_import(TRAINER, _keep_rng_state_in_checkpoints)
    if load or is_built():
        load_extension()


def uninstall() -> None:
    """Take back what accelerate and transformers see; PyTorch cannot forget a device, so `neuron` tensors go on."""
    while _undo:
        _undo.pop()()


# ---------------------------------------------------------------------------------------------------------- PyTorch


def _name_the_device() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "neuron"):
        raise RuntimeError(
            f"PyTorch has one slot for an out-of-tree device, and {name!r} holds it. Uninstall that backend, or start "
            "with TORCH_DEVICE_BACKEND_AUTOLOAD=0 so that it is not loaded."
        )
    if getattr(torch, "neuron", None) is runtime:
        return
    rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", runtime)
    generate_methods_for_privateuse1_backend()
    torch.set_autocast_dtype("neuron", torch.bfloat16)
    _print_on_the_host()


def _print_on_the_host() -> None:
    """Printing looks at a tensor's values in float64, which the core has not: look at a copy on the host."""
    printing: Any = torch._tensor_str
    to_float64 = printing.tensor_totype

    @functools.wraps(to_float64)
    def on_the_host(tensor: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = to_float64(tensor.cpu() if tensor.device.type == "neuron" else tensor)
        return values

    printing.tensor_totype = on_the_host


def _hide_cuda() -> None:
    """CUDA would win in accelerate and transformers: hide it from this process, and say so."""
    if torch.version.cuda is None and torch.version.hip is None:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is in use in this process, and accelerate and transformers would choose it over the simulated "
            "NeuronCores. Import optimum_trn before anything uses CUDA, or start with CUDA_VISIBLE_DEVICES=''."
        )
    if torch.cuda.is_available():
        _set_environment("CUDA_VISIBLE_DEVICES", "")
        logger.warning(
            "This host has a CUDA device; it is hidden from this process, which runs on simulated NeuronCores. "
            "OPTIMUM_TRN_DEVICE=cpu keeps the simulator out."
        )


def _hide_xla() -> None:
    """PyTorch/XLA would win too; both libraries read USE_TORCH_XLA once, when they are imported."""
    if importlib.util.find_spec("torch_xla") is None or os.environ.get("USE_TORCH_XLA", "1") in ("0", "false"):
        return
    too_late = [name for name in AVAILABILITY_CHECKS if name in sys.modules]
    if too_late:
        raise RuntimeError(
            f"torch_xla is installed and {too_late[0].partition('.')[0]} is imported already, so that it would choose "
            "XLA over the simulated NeuronCores. Import optimum_trn first, or start with USE_TORCH_XLA=0."
        )
    _set_environment("USE_TORCH_XLA", "0")
    logger.warning("torch_xla is installed; it is switched off in this process, which runs on simulated NeuronCores.")


def _set_environment(name: str, value: str) -> None:
    previous = os.environ.get(name)
    os.environ[name] = value

    def restore() -> None:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous

    _undo.append(restore)


# --------------------------------------------------------------------------------- what accelerate and transformers ask


def _announce_package() -> None:
    """Both libraries look for the spec of `torch_neuronx` and then ask `torch.neuron`; they call nothing on it."""
    package = ModuleType(PACKAGE, "Stands for the Neuron device package while optimum_trn simulates it.")
    package.__spec__ = ModuleSpec(PACKAGE, loader=None)
    package.__dict__["simulated_by"] = "optimum_trn"
    sys.modules[PACKAGE] = package

    def forget() -> None:
        sys.modules.pop(PACKAGE, None)

    _undo.append(forget)


def _forget_answers() -> None:
    """Both libraries cache whether there is a Neuron device; an answer from before this moment is stale."""
    for module_name, function_name in AVAILABILITY_CHECKS.items():
        if module_name in sys.modules:
            getattr(sys.modules[module_name], function_name).cache_clear()


class _AfterImport(MetaPathFinder, Loader):
    """Runs a function on a module once it has been imported, without importing it."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]):
        self.name, self.function = name, function
        self.loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self.loader is not None
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self.loader is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.function(module)


def _after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        function(sys.modules[name])
        return
    finder = _AfterImport(name, function)
    sys.meta_path.insert(0, finder)
    _undo.append(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)


def _say_that_fp16_is_not_available(checks_module: ModuleType) -> None:
    """accelerate refuses fp16 on Neuron devices, but says that it is available on all devices but one."""
    answer = checks_module.__dict__["is_fp16_available"]

    @functools.wraps(answer)
    def is_fp16_available() -> bool:
        return answer() and not checks_module.__dict__["is_neuron_available"]()

    # Where accelerate is imported already, its package holds the function under the same name.
    modules = [checks_module, *filter(None, [sys.modules.get("accelerate.utils")])]

    def put(function: Callable[[], bool]) -> None:
        for module in modules:
            module.__dict__["is_fp16_available"] = function

    put(is_fp16_available)
    _undo.append(lambda: put(answer))


def _refuse_mixed_precision_the_core_has_not(state_module: ModuleType) -> None:
    """accelerate refuses fp16 by a list of other devices, and looks for CUDA's fp8 libraries; name the way out."""
    state = state_module.__dict__["AcceleratorState"]
    initialise = state.__init__

    def __init__(self: Any, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        wanted = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
        known = state_module.__dict__["PartialState"]._shared_state.get("device")
        on_cpu = cpu or state_module.__dict__["parse_flag_from_env"]("ACCELERATE_USE_CPU")
        if wanted in ("fp16", "fp8") and (not on_cpu if known is None else known.type == "neuron"):
            raise ValueError(
                f"Mixed precision {wanted} is not for Neuron devices: fp16 needs loss scaling and fp8 kernels of other "
                "vendors, and a NeuronCore has neither. Use bfloat16: bf16=True in TrainingArguments, "
                "mixed_precision='bf16' in Accelerator, or --mixed_precision bf16 for accelerate launch."
            )
        initialise(self, mixed_precision, cpu, **kwargs)

    state.__init__ = __init__
    _undo.append(lambda: setattr(state, "__init__", initialise))


def _refuse_models_that_processes_share(accelerator_module: ModuleType) -> None:
    """A stock Accelerator takes every process for a data-parallel one: rank 0's shards would overwrite the others'."""
    if "Accelerator" not in accelerator_module.__dict__:  # its own import of torch is what loads this package
        _after_import(ACCELERATOR_IS_DEFINED, lambda _: _refuse_models_that_processes_share(accelerator_module))
        return
    accelerator = accelerator_module.__dict__["Accelerator"]
    prepare = accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        patch = getattr(model, PATCH, None)
        if patch is not None and patch.config.shares_model and not hasattr(self, "replication"):
            raise ValueError(
                f"{type(model).__name__} is sharded over several processes, which a stock Accelerator takes for "
                "data-parallel ones. Use optimum_trn.NeuronAccelerator(parallel_config=...), with the degrees that the "
                "model was loaded with; it takes what Accelerator takes."
            )
        return prepare(self, model, *args, **kwargs)

    accelerator.prepare_model = prepare_model
    _undo.append(lambda: setattr(accelerator, "prepare_model", prepare))


def _refuse_kernels_of_other_vendors(models_module: ModuleType) -> None:
    """transformers would ask to install CUDA packages for flash attention and quantization; name the way out."""
    model_class = models_module.__dict__["PreTrainedModel"]
    check_attention, get_quantizer = (
        model_class._check_and_adjust_attn_implementation,
        models_module.__dict__["get_hf_quantizer"],
    )

    @functools.wraps(check_attention)
    def _check_and_adjust_attn_implementation(self: Any, attn_implementation: str | None, *args: Any, **kw: Any) -> Any:
        if attn_implementation is not None and "flash" in attn_implementation:
            raise ValueError(
                f"attn_implementation={attn_implementation!r} is a kernel for CUDA devices. On a NeuronCore use "
                "attn_implementation='sdpa' (the default), which runs as one fused operator."
            )
        return check_attention(self, attn_implementation, *args, **kw)

    @functools.wraps(get_quantizer)
    def get_hf_quantizer(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kw: Any) -> Any:
        asked = quantization_config or getattr(config, "quantization_config", None) or {}
        options = asked if isinstance(asked, dict) else vars(asked)
        method = getattr(options.get("quant_method"), "value", options.get("quant_method"))
        # GGUF is a file format: its weights are plain once read.
        if asked and method != "gguf" and device_map != "cpu" and not options.get("dequantize"):
            raise ValueError(
                f"Quantized weights ({method}) need kernels that a NeuronCore has not. Load the unquantized checkpoint "
                "in bfloat16 (dtype='bfloat16'), set dequantize=True in the quantization config where it has that, or "
                "load with device_map='cpu'."
            )
        return get_quantizer(config, quantization_config, device_map, *args, **kw)

    def restore() -> None:
        model_class._check_and_adjust_attn_implementation = check_attention
        models_module.__dict__["get_hf_quantizer"] = get_quantizer

    model_class._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation
    models_module.__dict__["get_hf_quantizer"] = get_hf_quantizer
    _undo.append(restore)


def _keep_rng_state_in_checkpoints(trainer_module: ModuleType) -> None:
    """Trainer stores the random state of the accelerators it knows by name; add the core's to the same file."""
    trainer = trainer_module.__dict__["Trainer"]
    save, load = trainer._save_rng_state, trainer._load_rng_state

    @functools.wraps(save)
    def _save_rng_state(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.args.device.type == "neuron":
            saved_random_state.add(random_state_file(self.args, output_dir))

    @functools.wraps(load)
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None and self.args.device.type == "neuron":
            saved_random_state.restore(random_state_file(self.args, checkpoint))

    def restore() -> None:
        trainer._save_rng_state, trainer._load_rng_state = save, load

    trainer._save_rng_state, trainer._load_rng_state = _save_rng_state, _load_rng_state
    _undo.append(restore)


@contextmanager
def fakes_are_tensors() -> Iterator[None]:
    """While active, transformers branches on fake tensors as on others, where it would take them for a compiler's.

    Whether a mask masks anything, and whether rows are packed, is then read off them as on a core.
    """
    modules = [importlib.import_module(name) for name in ("transformers.masking_utils", MODELS)]
    stock = [module.is_tracing for module in modules]
    for module, original in zip(modules, stock, strict=True):
        module.is_tracing = functools.partial(_is_tracing, original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in zip(modules, stock, strict=True):
            module.is_tracing = original  # type: ignore[attr-defined]


def _is_tracing(original: Callable[[Any], bool], tensor: Any = None) -> bool:
    return original(None if isinstance(tensor, torch.Tensor) else tensor)
