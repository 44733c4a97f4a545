"""Where the simulated cores can't exist, the first import says so, and how to go on."""

import platform
import sys
from pathlib import Path

import pytest

from optimum_trn.device import CONTAINER_COMMAND, build, check_platform
from tests.device.test_runtime import script

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_is_fine(monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    check_platform()


@pytest.mark.parametrize("system, machine", [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "armv7l")])
def test_elsewhere_the_error_names_the_container_command_that_the_readme_explains(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for load in (check_platform, build._find_or_build):
        with pytest.raises(ImportError, match="Linux") as raised:
            load()
        assert CONTAINER_COMMAND in str(raised.value) and f"{system} on {machine}" in str(raised.value)
    assert CONTAINER_COMMAND in README.read_text()


def test_the_import_fails_before_anything_that_only_linux_has_and_works_without_the_device():
    text = """
import sys, torch
sys.platform, sys.modules["fcntl"] = "win32", None
import optimum_trn
"""
    _, err, code = script(text)
    assert code != 0 and "ImportError: The simulated NeuronCores need Linux" in err
    _, err, code = script(text, OPTIMUM_TRN_DEVICE="cpu")
    assert code == 0, err
