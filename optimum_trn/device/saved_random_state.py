"""The random state of a NeuronCore in the file in which transformers' Trainer keeps those of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KEY = "neuron"


def random_state_file(arguments: Any, directory: str) -> Path:
    """Where a Trainer with these arguments keeps the random states of this process."""
    several = arguments.world_size > 1
    return Path(directory) / (f"rng_state_{arguments.process_index}.pth" if several else "rng_state.pth")


def add(file: Path) -> None:
    """Put the state of this process's core beside the others, unless it is there."""
    states = _read(file)
    if KEY not in states:
        torch.save({**states, KEY: torch.get_device_module(KEY).get_rng_state()}, file)


def restore(file: Path) -> None:
    """Continue with the state in the file, if there is one."""
    states = _read(file) if file.is_file() else {}
    if KEY in states:
        torch.get_device_module(KEY).set_rng_state(states[KEY])


def _read(file: Path) -> dict[str, Any]:
    from transformers.trainer_pt_utils import safe_globals  # where a Trainer is, it has been imported

    with safe_globals():
        states: dict[str, Any] = torch.load(file, weights_only=True)
    return states
