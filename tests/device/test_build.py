"""The extension is compiled once, by one process, and loaded cheaply."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from optimum_trn.device import build


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A module of three lines in place of the device: what is built is not what is tested here."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text(
        '#include <Python.h>\n#include <c10/core/Device.h>\nstatic PyModuleDef m{PyModuleDef_HEAD_INIT, "_small"};\n'
        'extern "C" __attribute__((visibility("default"))) PyObject* PyInit__small() { return PyModule_Create(&m); }\n'
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "NAME", "_small")
    monkeypatch.setattr(build, "_module", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "optimum_trn"


def reload(monkeypatch) -> None:
    monkeypatch.setattr(build, "_module", None)
    build.load_extension()


def test_builds_once_and_says_so(small, monkeypatch, capfd):
    build.load_extension()
    assert "compiling the simulated NeuronCores" in capfd.readouterr().err
    reload(monkeypatch)
    assert "compiling" not in capfd.readouterr().err
    assert [x.name for x in small.iterdir() if x.is_dir()] == [build.key()]
    assert not list(small.glob("*/*.o"))


@pytest.mark.parametrize("damage", ["garbage", "truncated", "missing", "checksum"])
def test_a_broken_cache_is_built_again(small, monkeypatch, capfd, damage):
    build.load_extension()
    library = small / build.key() / "_small.so"
    content = library.read_bytes()
    library.unlink()  # this process has the old file mapped
    if damage == "garbage":
        library.write_bytes(b"not a library")
    elif damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "checksum":
        library.write_bytes(content)
        (library.parent / "checksum").unlink()
    capfd.readouterr()
    reload(monkeypatch)
    assert "compiling" in capfd.readouterr().err


def test_a_library_that_does_not_load_is_built_again(small, monkeypatch, capfd):
    directory = small / build.key()
    directory.mkdir(parents=True)
    (directory / "_small.so").write_bytes(b"not a library")
    (directory / "checksum").write_text(build._checksum(directory))
    build.load_extension()
    assert "building it again" in capfd.readouterr().err


def test_source_and_version_name_the_build(small, monkeypatch):
    first = build.key()
    (build.SOURCES / "one.cpp").write_text("int x;")
    second = build.key()
    monkeypatch.setattr(build.torch, "__version__", "9.9.9")
    assert len({first, second, build.key()}) == 3


def test_an_error_of_the_compiler_is_shown(small):
    (build.SOURCES / "one.cpp").write_text("this is not C++")
    with pytest.raises(ImportError, match="(?s)failed:.*error"):
        build.load_extension()
    assert not (small / build.key() / "checksum").exists()


def test_without_a_compiler_the_error_names_the_package(small, monkeypatch):
    monkeypatch.setenv("PATH", str(small))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ImportError, match="apt-get install g\\+\\+"):
        build.load_extension()


def test_another_platform_is_refused_by_name(small, monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(ImportError, match="Linux"):
        build.load_extension()


def test_ranks_that_start_together_build_once(small, tmp_path):
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path; from optimum_trn.device import build; build.NAME = '_small'; "
                f"build.SOURCES = Path({str(build.SOURCES)!r}); build.load_extension()",
            ],
            env={**os.environ, "OPTIMUM_TRN_DEVICE": "cpu"},  # importing the package would build the real device
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert sum("compiling the simulated" in text for text in errors) == 1


def test_loading_what_is_built_imports_no_build_system():
    done = script(
        """
        import sys, torch
        before = set(sys.modules)
        from optimum_trn.device.build import load_extension
        load_extension()
        new = set(sys.modules) - before
        assert not {"torch.utils.cpp_extension", "setuptools", "ninja"} & new, sorted(new)
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_wheel_may_carry_the_extension(small, tmp_path, monkeypatch, capfd):
    build.load_extension()
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    shutil.copytree(small / build.key(), tmp_path / "prebuilt" / build.key())
    shutil.rmtree(small)
    capfd.readouterr()
    reload(monkeypatch)
    assert "compiling" not in capfd.readouterr().err and not Path(small).exists()
