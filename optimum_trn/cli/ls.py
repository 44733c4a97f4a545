"""`optimum-trn ls`: the simulated devices of this host, as neuron-ls shows real ones; -j as JSON, -t their topology."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from optimum_trn.device.core_status import CoreStatus, running_cores
from optimum_trn.device.runtime import instance, logical_core_size
from optimum_trn.hardware import GiB, InstanceSpec


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("ls", help="list the simulated devices")
    parser.add_argument("-j", "--json-output", action="store_true", help="as JSON, with the fields of neuron-ls")
    parser.add_argument("-t", "--topology", action="store_true", help="draw how the devices are connected")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the devices of the instance that OPTIMUM_TRN_INSTANCE names."""
    spec = instance()
    found = devices(spec, logical_core_size(), running_cores())
    if options.json_output:
        print(json.dumps(found, indent=4))
        return
    print(f"instance-type: {spec.name} (simulated)\nlogical-neuroncore-config: {logical_core_size()}")
    shown = Table("NEURON DEVICE", "NEURON CORES", "NEURON MEMORY", "CONNECTED DEVICES", "PID", "COMMAND")
    for device in found:
        processes = device["neuron_processes"]
        shown.add_row(
            str(device["neuron_device"]),
            str(device["nc_count"]),
            f"{device['memory_size'] / GiB:.0f} GiB",
            ", ".join(map(str, device["connected_to"])),
            "\n".join(str(process["pid"]) for process in processes),
            "\n".join(process["command"] for process in processes),
        )
    Console().print(shown)
    if options.topology:
        print(drawing(spec))


def devices(spec: InstanceSpec, core_size: int, cores: list[CoreStatus]) -> list[dict[str, Any]]:
    """What `neuron-ls --json-output` tells of each device (aws-neuron-sdk, tools/neuron-sys-tools/neuron-ls.rst).

    There is no PCI bus and no NUMA node behind a simulated device: `bdf` and `cpu_affinity` are empty, `numa_node` -1.
    """
    count = spec.chip.logical_cores(core_size)
    return [
        {
            "neuron_device": device,
            "bdf": "",
            "cpu_affinity": "",
            "numa_node": -1,
            "connected_to": neighbours(spec, device),
            "nc_count": count,
            "logical_neuroncore_config": core_size,
            "memory_size": spec.chip.hbm_bytes,
            "neuroncore_ids": list(range(device * count, (device + 1) * count)),
            "neuron_processes": [
                {"pid": core.pid, "command": core.command, "neuron_runtime_version": "simulated"}
                for core in cores
                if core.instance == spec.name and core.core // count == device
            ],
        }
        for device in range(spec.num_chips)
    ]


def neighbours(spec: InstanceSpec, device: int) -> list[int]:
    """The devices that share a NeuronLink with one: the sixteen of an instance form a torus of 4 x 4."""
    if spec.num_chips != 16:
        return []
    row, column = divmod(device, 4)
    around = [((row - 1) % 4, column), ((row + 1) % 4, column), (row, (column - 1) % 4), (row, (column + 1) % 4)]
    return sorted(4 * r + c for r, c in around)


def drawing(spec: InstanceSpec) -> str:
    """The links between the devices, in letters; the arrows at the edges lead round to the other side."""
    if spec.num_chips != 16:
        return "One device, which has no links.\n"

    def between(mark: str) -> str:
        return " " * 5 + (" " * 6).join(mark * 4)

    lines = [between("↕")]
    for row in range(4):
        devices_of_row = " ─ ".join(f"[{4 * row + column:2d}]" for column in range(4))
        lines += [f"  ↔ {devices_of_row} ↔", between("│" if row < 3 else "↕")]
    return "\n".join(lines)
