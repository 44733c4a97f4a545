"""The simulated NeuronCore: PyTorch's device `neuron` on any Linux machine."""

import os
import platform
import sys

__all__ = ["CONTAINER_COMMAND", "check_platform", "device_type"]

CONTAINER_COMMAND = (
    'docker run --rm -it --shm-size 2g -v "$PWD":/src -v optimum-trn:/venv -w /src python:3.11 make demo VENV=/venv'
)
"""Runs `make demo` of a checkout in a Linux container, from any system that has Docker; README.md explains it."""


def device_type() -> str:
    """The device type that the layers above compute on: "neuron", or "cpu" where OPTIMUM_TRN_DEVICE=cpu.

    Raises ValueError for any other value of the variable.
    """
    chosen = os.environ.get("OPTIMUM_TRN_DEVICE") or "neuron"
    if chosen not in ("neuron", "cpu"):
        raise ValueError(f"OPTIMUM_TRN_DEVICE={chosen!r} is neither 'neuron' (the default) nor 'cpu' (no simulator).")
    return chosen


def check_platform() -> None:
    """Raise ImportError where the simulated cores can't exist: HBM and the process group need a 64-bit Linux kernel."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise ImportError(
            f"The simulated NeuronCores need Linux on x86-64 or aarch64, and this is {sys.platform} on "
            f"{platform.machine()}. From a checkout, run it in a container: {CONTAINER_COMMAND} (see README.md), or "
            "set OPTIMUM_TRN_DEVICE=cpu to use everything but the device."
        )
