"""Package metadata of optimum_trn; the device extension is compiled on first use unless a wheel carries it."""

from pathlib import Path

from setuptools import find_packages, setup

TEST = ["pytest>=8", "pytest-timeout>=2.3", "expecttest>=0.2"]
EXAMPLES = ["gguf>=0.10", "sentencepiece>=0.2"]
DEV = ["ruff>=0.6", "mypy>=1.11", "pre-commit>=3"]

setup(
    name="optimum_trn",
    version="0.1.0.dev0",
    description="Hugging Face training for AWS Trainium that runs on any machine: simulated NeuronCores with exact numerics.",
    long_description=Path(__file__).with_name("README.md").read_text() if Path(__file__).with_name("README.md").exists() else "",
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
        "ninja>=1.11",
        "rich>=13",
        "numpy",
        "setuptools",
    ],
    extras_require={"test": TEST, "examples": EXAMPLES, "dev": [*DEV, *TEST, *EXAMPLES]},
    entry_points={
        "torch.backends": ["optimum_trn = optimum_trn_autoload:autoload"],
    },
)
