"""The devices that every claim about parallel code is tested on, and the one that a rank of a pool has."""

import os

import pytest
import torch

from optimum_trn.device.build import load_extension

DEVICES = ["cpu", "neuron"]
# For what sits above layers and collectives, whose own tests run on both.
NEURON_FIRST = ["neuron", pytest.param("cpu", marks=pytest.mark.full)]


def local_device() -> torch.device:
    """The device of this rank of a pool."""
    name = os.environ["OPTIMUM_TRN_DEVICE"]
    if name == "cpu":
        return torch.device(name)
    # The extension reads the variable when it is loaded, which was before this job of the pool.
    load_extension().allow_unsupported_types(os.environ.get("OPTIMUM_TRN_ALLOW_FLOAT64") == "1")
    return torch.device(name, int(os.environ["LOCAL_RANK"]))


# Parity is proven in float64, which the hardware and so the simulated core refuse unless a test asks for it.
FLOAT64 = {"OPTIMUM_TRN_ALLOW_FLOAT64": "1"}
