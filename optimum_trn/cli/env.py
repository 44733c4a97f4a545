"""`optimum-trn env`: versions, what is simulated, and where the ranks of a layout are placed."""

from __future__ import annotations

import argparse
import platform
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from optimum_trn.device import device_type
from optimum_trn.device.runtime import instance, logical_core_size
from optimum_trn.hardware import GiB
from optimum_trn.parallel import ParallelConfig
from optimum_trn.parallel.mesh import world_size
from optimum_trn.parallel.topology import launched_topology, placement_table

DEGREES = [field.name for field in fields(ParallelConfig) if type(field.default) is int]


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("env", help="show versions, the simulated hardware and the placement of ranks")
    parser.add_argument("--world-size", type=int, help="number of processes (default: those of this job, or one copy)")
    for name in DEGREES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    parser.set_defaults(run=show)


def show(options: argparse.Namespace) -> None:
    """Print the environment; `MeshError` for degrees that do not multiply out."""
    spec, core_size = instance(), logical_core_size()
    print(f"optimum_trn {version('optimum_trn')}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "accelerate")))
    device = "simulated NeuronCores" if device_type() == "neuron" else "the CPU (OPTIMUM_TRN_DEVICE=cpu)"
    memory = spec.chip.hbm_bytes_per_core(core_size) / GiB
    print(
        f"device: {device}; instance {spec.name}: {spec.num_chips} x {spec.chip.name}, "
        f"{spec.chip.logical_cores(core_size)} cores a chip, {memory:g} GiB a core"
    )
    config = ParallelConfig(**{name: getattr(options, name) for name in DEGREES})
    size = options.world_size or max(world_size(), config.ranks_per_copy)
    print(placement_table(config, launched_topology(size)))
