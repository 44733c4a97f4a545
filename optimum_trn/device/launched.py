"""What `optimum-trn launch` tells the processes that it starts, in their environment."""

from __future__ import annotations

import os

CONTROLLER = "OPTIMUM_TRN_CONTROLLER"  # host:port of the store of the job
NODES, DEVICES = "OPTIMUM_TRN_NODES", "OPTIMUM_TRN_DEVICES"  # how many nodes were started, of how many processes each
MEMBER, NODE, LOCAL = "OPTIMUM_TRN_MEMBER", "OPTIMUM_TRN_NODE", "OPTIMUM_TRN_LOCAL"  # who this process is
FAULT_TOLERANCE = "OPTIMUM_TRN_FAULT_TOLERANCE"  # how many nodes may be lost at once
ENGINE = "OPTIMUM_TRN_ENGINE"  # the module that makes the engine of training, which knows of losses


def fault_tolerance() -> int | None:
    """How many nodes the launcher lets go; None where it was not told, or did not start this process."""
    text = os.environ.get(FAULT_TOLERANCE)
    return None if text is None else int(text)


def is_launched() -> bool:
    """Whether `optimum-trn launch` has started this process."""
    return CONTROLLER in os.environ


def first_position() -> int:
    """This process's place among all, until there is a first generation."""
    return int(os.environ.get(MEMBER, "0")) * int(os.environ.get(DEVICES, "1")) + int(os.environ.get(LOCAL, "0"))
