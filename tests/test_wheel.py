"""A wheel carries the compiled device, which is used only where it fits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimum_trn.device import build

REPOSITORY = Path(__file__).resolve().parent.parent

USE = """
import torch, optimum_trn
assert optimum_trn.__file__.startswith({site!r}), optimum_trn.__file__
print(torch.ones(2, device="neuron").sum().item(), end="")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory into which a wheel of this checkout is installed, without its dependencies."""
    scratch = tmp_path_factory.mktemp("wheel")
    # A copy: building writes into the directory of the sources.
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    for name in names.decode().split("\0"):
        if name.startswith("optimum_trn") or name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            if (REPOSITORY / name).is_file():
                target = scratch / "source" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((REPOSITORY / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", scratch, "."], cwd=scratch / "source", check=True
    )
    (wheel,) = scratch.glob("*.whl")
    assert "py3-none-any" not in wheel.name
    subprocess.run([*pip, "install", "--no-deps", "--target", scratch / "site", wheel], check=True)
    return scratch / "site"


def use(site, cache):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPTIMUM_TRN_")}
    environment |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(cache), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", USE.format(site=str(site))], cwd=cache, env=environment, capture_output=True, text=True
    )
    return done.stdout, done.stderr, list(Path(cache).iterdir())


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_wheel_needs_no_compiler_unless_torch_or_the_source_is_another(site, tmp_path):
    assert (site / "optimum_trn" / "py.typed").exists()
    assert [path.name for path in (site / "optimum_trn/device/prebuilt").iterdir()] == [build.key()]
    out, err, cached = use(site, tmp_path)
    assert out == "2.0" and cached == [], err
    with (site / "optimum_trn/device/csrc/neuron.h").open("a") as file:
        file.write("// another source\n")
    out, err, _ = use(site, tmp_path)
    assert out == "" and "Install g++" in err
