"""The simulated NeuronCore: PyTorch's device `neuron` on any Linux machine."""

import os

__all__ = ["device_type"]


def device_type() -> str:
    """The device type that the layers above compute and communicate on: "neuron", or "cpu" where OPTIMUM_TRN_DEVICE=cpu.

    Raises ValueError for any other value of the variable.
    """
    chosen = os.environ.get("OPTIMUM_TRN_DEVICE") or "neuron"
    if chosen not in ("neuron", "cpu"):
        raise ValueError(f"OPTIMUM_TRN_DEVICE={chosen!r} is neither 'neuron' (the default) nor 'cpu' (no simulator).")
    return chosen
