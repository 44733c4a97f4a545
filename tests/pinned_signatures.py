"""What optimum_trn relies on in torch, transformers, accelerate and peft beyond their public API, with its signatures.

    .venv/bin/python -m tests.pinned_signatures     # writes pinned_signatures.json anew: look at what moved

The names are read off our sources: what is imported from inside these libraries, the methods that our subclasses
override, and private attributes, which are looked up in the classes that own them.
"""

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import optimum_trn

PINNED = Path(__file__).with_suffix(".json")
PACKAGE = Path(optimum_trn.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate", "huggingface_hub", "peft")

OWNERS = (
    "transformers.Trainer",
    "transformers.PreTrainedModel",
    "transformers.AutoModelForCausalLM",
    "transformers.trainer_pt_utils.BatchRebalanceSampler",
    "accelerate.Accelerator",
    "accelerate.data_loader.DataLoaderShard",
    "accelerate.data_loader.DataLoaderDispatcher",
    "torch.nn.Module",
    "torch.nn.modules.dropout",
    "torch.Tensor",
    "torch.ScriptObject",
    "torch.UntypedStorage",
    "torch._dynamo.backends.registry",
    "torch._ops.OpOverload",
    "torch.utils.data.RandomSampler",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.ProcessGroupGloo",
    "torch.distributed.ProcessGroupGloo._Options",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.conv",
    "peft.tuners.lora.Linear",
)
"""Classes and modules whose private attributes we use; their instance attributes count if their source assigns them."""

NAMED_IN_STRINGS = (
    "accelerate.utils.imports.is_fp16_available",
    "accelerate.utils.imports.is_neuron_available",
    "transformers.utils.import_utils.is_torch_neuron_available",
    "transformers.PreTrainedModel:_check_and_adjust_attn_implementation",
    "transformers.modeling_utils.get_hf_quantizer",
    "torch._tensor_str.tensor_totype",
    "torch.utils.rename_privateuse1_backend",
    "torch.utils.generate_methods_for_privateuse1_backend",
)
"""What device/install.py reaches through strings and local names, which reading it does not show."""

WRITTEN_BY_US = {
    "_is_hf_initialized": "transformers.initialization",
    "_weight_conversions": "transformers.core_model_loading",
    "_is_accelerate_prepared": "accelerate.accelerator",
    "_boxed_call": "torch._functorch._aot_autograd.utils",
    "ds_shape": "peft.tuners.tuners_utils",
}
"""Attributes that we set for a library to read, and the module whose source reads them."""

PUBLIC_WITH_UNDERSCORE = {"_replace", "_asdict", "_fields", "_getframe", "_strip_protocol"}
"""Documented attributes of named tuples, of sys, and of fsspec's file systems."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package, parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def is_public(module: str, name: str) -> bool:
    """Whether a library documents the name: its top level exports it, or a module of torch lists it in `__all__`."""
    if "." not in module:
        return True
    exported = getattr(importlib.import_module(module), "__all__", ())
    return module.startswith("torch.") and not is_private(module) and (name in exported or module == "torch.nn")


def imported_names() -> set[str]:
    """Names from inside the libraries, by `from ... import` or as private attributes of a module that we name."""
    names: set[str] = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                if node.module.split(".")[0] in LIBRARIES:
                    imported = [alias.name for alias in node.names if not is_public(node.module, alias.name)]
                    names |= {f"{node.module}.{name}" for name in imported}
            elif isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                if (
                    re.fullmatch(r"torch(\.\w+)+", dotted)
                    and is_private(dotted)
                    and not dotted.startswith("torch.ops.")
                ):
                    names.add(dotted)
    # A chain such as torch._C._name is one name, not also its beginnings.
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def overridden_names() -> set[str]:
    """Methods and attributes of the libraries' classes that one of ours defines anew; a mixin, where it is mixed in."""
    names: set[str] = set()
    for info in pkgutil.walk_packages([str(PACKAGE)], "optimum_trn."):
        for cls in vars(importlib.import_module(info.name)).values():
            if not (inspect.isclass(cls) and cls.__module__ == info.name):
                continue
            for place, part in enumerate(cls.__mro__):
                if part.__module__.split(".")[0] != PACKAGE.name:
                    continue
                # The rest is made by decorators and metaclasses.
                written = set(re.findall(r"def (\w+)", inspect.getsource(part)))
                for attribute in written & vars(part).keys():
                    owner = next((base for base in cls.__mro__[place + 1 :] if attribute in vars(base)), object)
                    if owner.__module__.split(".")[0] in LIBRARIES:
                        names.add(f"{owner.__module__}.{owner.__qualname__}.{attribute}")
    return names


def private_attributes() -> set[str]:
    """Private attributes that we use and don't define."""
    used: set[str] = set()
    defined: set[str] = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                root = ast.unparse(node.value)
                ours = isinstance(node.ctx, ast.Store) and root == "self"
                if ours:
                    defined.add(node.attr)
                elif not root.startswith("torch"):
                    used.add(node.attr)
    return used - defined - PUBLIC_WITH_UNDERSCORE


def resolve(name: str) -> Any:
    """The object of a dotted name; raises AttributeError or ImportError where it is gone."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return found
    raise ImportError(name)


def owned_names() -> set[str]:
    """The private attributes by their owners; one without an owner stands alone, and does not resolve."""
    names = set()
    for attribute in private_attributes():
        owners = [name for name in OWNERS if holds(resolve(name), attribute)]
        if attribute in WRITTEN_BY_US:
            owners = [WRITTEN_BY_US[attribute]]
        names |= {f"{owner}:{attribute}" for owner in owners} or {attribute}
    return names


def holds(owner: Any, attribute: str) -> bool:
    """Whether a class or module has the attribute, or its source names it (as an instance's attribute, say)."""
    return hasattr(owner, attribute) or re.search(rf"\b{attribute}\b", source_of(owner)) is not None


@functools.cache  # finding a class in a long file takes Python a second
def source_of(owner: Any) -> str:
    """Source of a class or module; empty where it is written in C++."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def signature(name: str) -> str:
    """Parameter names, kinds and defaults of a callable, the value of a constant, the kind of anything else.

    Annotations are left out: they read differently from one Python to the next.
    """
    owner, _, attribute = name.partition(":")
    if attribute:
        found = resolve(owner)
        if not holds(found, attribute):
            raise AttributeError(f"{owner} has no {attribute}")
        value = inspect.getattr_static(found, attribute, None)
        return describe(value) if callable(value) or isinstance(value, classmethod | staticmethod) else "attribute"
    return describe(resolve(name))


def describe(value: Any) -> str:
    """The signature of one object, as text."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        return "property"
    if isinstance(value, ModuleType):
        return "module"
    if callable(value):
        try:
            found = inspect.signature(value)
        except (TypeError, ValueError):
            return "built-in"
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
        text = str(inspect.Signature(bare))
        return re.sub(r" at 0x[0-9a-f]+", "", text)
    return repr(value) if isinstance(value, str | int | bool | float | None) else type(value).__name__


def names() -> list[str]:
    """Everything that we rely on, sorted."""
    return sorted({*imported_names(), *overridden_names(), *owned_names(), *NAMED_IN_STRINGS})


def signatures() -> dict[str, str]:
    """What is installed now; a name that is gone has the signature "gone"."""
    found = {}
    for name in names():
        try:
            found[name] = signature(name)
        except (AttributeError, ImportError):
            found[name] = "gone"
    return found


if __name__ == "__main__":
    PINNED.write_text(json.dumps(signatures(), indent=1) + "\n")
