"""Package metadata of optimum_trn, and wheels that carry the compiled device (else it is compiled on first use)."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

PEFT = ["peft>=0.21,<0.22"]
# What hyperparameter_search and report_to="tensorboard" of the Trainer need.
TRAINER = ["optuna>=4", "tensorboard>=2.18"]
TRL = ["trl>=1.16,<1.17; python_version >= '3.11'"]  # which TRL requires
POOL = ["simpy>=4.1"]  # the simulator of the pool
TEST = ["pytest>=8", "pytest-timeout>=2.3", "expecttest>=0.2", *PEFT, *TRAINER, *TRL, *POOL]
# What accelerate's own tests need, and the runner that holds them to expectations (tests/conformance).
CONFORMANCE = ["parameterized>=0.9", "torchdata>=0.11", "pyyaml"]
EXAMPLES = ["gguf>=0.10", "matplotlib>=3.8", "sentencepiece>=0.2", *PEFT, *TRL]
RAY = ["ray[train]>=2.40"]
DEV = ["ruff>=0.6", "mypy>=1.11", "pre-commit>=3"]

HERE = Path(__file__).resolve().parent


def can_compile() -> bool:
    """Whether the device can be compiled here and now, for the PyTorch that is installed."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return sys.platform.startswith("linux") and compiler is not None and importlib.util.find_spec("torch") is not None


class BuildWithDevice(build_py):
    """Puts the compiled device where device/build.py looks first, in a directory named after PyTorch and the source."""

    def run(self) -> None:
        super().run()
        prebuilt = Path(self.build_lib, "optimum_trn", "device", "prebuilt")
        shutil.rmtree(prebuilt, ignore_errors=True)  # of an earlier build in the same directory
        if self.editable_mode:
            return
        if not can_compile():
            self.warn(
                "no g++ or no PyTorch here: the wheel carries no compiled device, which is then compiled on first use"
            )
            return
        os.environ["OPTIMUM_TRN_DEVICE"] = "cpu"  # importing the package must not load the device that is to be built
        sys.path.insert(0, str(HERE))
        from optimum_trn.device import build

        directory = prebuilt / build.key()
        build.build(directory.absolute())
        for file in directory.iterdir():
            if file.name not in (f"{build.NAME}.so", "checksum"):
                file.unlink()


class DistributionWithDevice(Distribution):
    """Has its wheel named after Python and machine where it carries the compiled device."""

    def has_ext_modules(self) -> bool:
        return "editable_wheel" not in self.commands and can_compile()


setup(
    distclass=DistributionWithDevice,
    cmdclass={"build_py": BuildWithDevice},
    name="optimum_trn",
    version="0.1.0.dev0",
    description="Hugging Face training for AWS Trainium on any machine: simulated NeuronCores with exact numerics.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["optimum_trn", "optimum_trn.*"]),
    py_modules=["optimum_trn_autoload"],
    package_data={"optimum_trn": ["py.typed", "device/csrc/*"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "transformers>=5.24,<5.25",
        "accelerate>=1.15,<1.16",
        "datasets>=3",
        "safetensors>=0.5",
        "fsspec>=2024.2",
        "xxhash>=3",
        "ninja>=1.11",
        "rich>=13",
        "simpy>=4.1",
        "numpy",
        "setuptools",
    ],
    extras_require={
        "peft": PEFT,
        "trl": TRL,
        "test": [*TEST, *CONFORMANCE],
        "conformance": CONFORMANCE,
        "examples": EXAMPLES,
        "ray": RAY,
        "pool": POOL,
        "dev": [*DEV, *TEST, *CONFORMANCE, *EXAMPLES, *RAY],
    },
    entry_points={
        "console_scripts": ["optimum-trn = optimum_trn.cli:main"],
        "torch.backends": ["optimum_trn = optimum_trn_autoload:autoload"],
        "fsspec.specs": ["pool = optimum_trn.pool.filesystem:PoolFileSystem"],
    },
)
