"""The door to other libraries: what they see after installing, what autoload costs, and that it can be undone."""

import sys
from types import ModuleType

import pytest
import torch

from optimum_trn.device import device_type, install
from tests.device.test_runtime import script


def test_nothing_happens_without_autoload():
    out, err, code = script(
        "import sys, torch; "
        "print('optimum_trn' in sys.modules, hasattr(torch, 'neuron'), torch._C._get_privateuse1_backend_name())"
    )
    assert out == "False False privateuseone" and code == 0, err


def test_autoload_is_cheap_and_imports_neither_library():
    text = """
import os, sys
os.environ["OPTIMUM_TRN_AUTOLOAD"] = "0"
import torch
import optimum_trn_autoload
before = set(sys.modules)
os.environ["OPTIMUM_TRN_AUTOLOAD"] = "1"
optimum_trn_autoload.autoload()
assert "optimum_trn" in sys.modules and torch.device("neuron").type == "neuron"
slow = {"accelerate", "transformers", "torch.utils.cpp_extension", "torch._dynamo", "torch._inductor"}
print(*sorted(slow & set(sys.modules)), *sorted({m.partition(".")[0] for m in set(sys.modules) - before}), sep=",")
"""
    out, err, code = script(text)
    (modules,) = out.splitlines()
    assert code == 0, err
    assert not {"accelerate", "transformers", "numpy"} & set(modules.split(",")), modules
    assert "torch._dynamo" not in modules and "cpp_extension" not in modules


def test_autoload_compiles_on_first_use_only(tmp_path):
    """With an empty cache and no compiler, importing works, and using the device says what to install."""
    text = """
import torch
torch.manual_seed(0)
print(torch.device("neuron"), torch.neuron.device_count())
try:
    torch.ones(1, device="neuron")
except ImportError as error:
    print(error)
"""
    out, err, code = script(text, OPTIMUM_TRN_AUTOLOAD="1", XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    first, second = out.splitlines()
    assert first == "neuron 4" and "Install g++" in second and code == 0, err


def test_accelerate_and_transformers_see_neuron():
    from accelerate.utils import is_neuron_available
    from transformers.utils import is_torch_neuron_available
    from transformers.utils.import_utils import is_torch_bf16_gpu_available

    assert is_neuron_available() and is_torch_neuron_available() and is_torch_bf16_gpu_available()


def test_an_answer_cached_before_installing_is_forgotten():
    text = """
import os
os.environ["OPTIMUM_TRN_DEVICE"] = "cpu"
from accelerate.utils import is_neuron_available
before = is_neuron_available()
os.environ["OPTIMUM_TRN_DEVICE"] = "neuron"
from optimum_trn.device.install import install, installed, uninstall
install()
print(before, is_neuron_available())
uninstall()
print(installed(), is_neuron_available())
install()
print(installed(), is_neuron_available())
"""
    out, err, code = script(text)
    assert out.splitlines() == ["False True", "False False", "True True"] and code == 0, err


def test_the_real_device_keeps_the_simulator_out(tmp_path):
    (tmp_path / "torch_neuronx.py").write_text("")
    out, err, code = script("import optimum_trn, torch; print(hasattr(torch, 'neuron'))", PYTHONPATH=str(tmp_path))
    assert out == "False" and code == 0, err


def test_another_backend_in_the_slot_is_named():
    text = """
import torch
torch.utils.rename_privateuse1_backend("other")
try:
    import optimum_trn
except RuntimeError as error:
    print(error)
"""
    out, err, code = script(text)
    assert "'other' holds it" in out and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in out and code == 0, err


@pytest.fixture
def reinstalled(monkeypatch):
    """Uninstalls for the test, and installs again afterwards with the world as it was."""
    install.uninstall()
    with monkeypatch.context() as patch:
        yield patch
        install.uninstall()
    install.install()


def test_cuda_on_the_host_does_not_win_silently(reinstalled, caplog):
    reinstalled.setattr(torch.version, "cuda", "13.0")
    reinstalled.setattr(torch.cuda, "is_available", lambda: True)
    reinstalled.setenv("CUDA_VISIBLE_DEVICES", "0")
    install.install()
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and "CUDA device; it is hidden" in caplog.text
    install.uninstall()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    reinstalled.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Import optimum_trn before anything uses CUDA"):
        install.install()


def test_torch_xla_does_not_win_silently(tmp_path):
    (tmp_path / "torch_xla.py").write_text("__version__ = '2.9'")
    text = "import optimum_trn; from accelerate import PartialState; print(PartialState().device.type)"
    out, err, code = script(text, PYTHONPATH=str(tmp_path))
    assert out == "neuron" and "torch_xla is installed; it is switched off" in err and code == 0, err
    out, err, code = script("import accelerate, optimum_trn", PYTHONPATH=str(tmp_path))
    assert code != 0 and "Import optimum_trn first, or start with USE_TORCH_XLA=0" in err


def test_device_type(monkeypatch):
    monkeypatch.delenv("OPTIMUM_TRN_DEVICE", raising=False)
    assert device_type() == "neuron"
    monkeypatch.setenv("OPTIMUM_TRN_DEVICE", "cpu")
    assert device_type() == "cpu"
    monkeypatch.setenv("OPTIMUM_TRN_DEVICE", "tpu")
    with pytest.raises(ValueError, match="neither 'neuron'"):
        device_type()


def test_a_module_is_patched_when_it_is_imported_and_restored(monkeypatch):
    name = "optimum_trn_test_module"
    undone = list(install._undo)
    seen = []
    install._after_import(name, seen.append)
    finder = sys.meta_path[0]
    assert isinstance(finder, install._AfterImport)
    install._undo[-1]()
    install._undo[:] = undone
    assert finder not in sys.meta_path and seen == []
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    install._after_import(name, seen.append)
    install._undo[:] = undone
    assert seen == [module]
