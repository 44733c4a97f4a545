"""Weak scaling of a 100B model with MiCS from 128 to 512 GPUs, and ZeRO-3 beside it: predicted, with every constant.

    python benchmarks/mics_scaling.py

MiCS (Zhang et al. 2022, arXiv:2205.00119) claims 99.4 % from 128 to 512 A100 of p4d.24xlarge. Weights are gathered
twice and gradients scattered once for each micro-batch, over partition groups of 128 (MiCS) or over all devices
(ZeRO-3, Rajbhandari et al. 2020, arXiv:1910.02054); MiCS all-reduces its shard over the replicas once a step. The exit
code says whether the predicted efficiency is within 0.989 and 0.999.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from optimum_trn.cost import collectives as links
from optimum_trn.cost import get_machine

CONSTANTS: dict[str, tuple[float, str]] = {
    "parameters": (100e9, "the model of the paper's weak-scaling claim"),
    "layers": (80, "assumed: what is gathered at a time"),
    "bytes per weight and gradient": (2, "assumed: half precision"),
    "tokens per device and micro-batch": (4096, "assumed"),
    "micro-batches per step": (4, "assumed"),
    "FLOPs per weight and token": (8, "forward, backward and recomputation"),
    "share of peak in computation": (0.60, "assumed; the paper reports 0.545 of peak for the whole step"),
    "peak FLOPs": (312e12, "A100, bfloat16 (NVIDIA datasheet)"),
    "network bytes/s per node": (50e9, "p4d.24xlarge, 400 Gbps (AWS)"),
    "share of the network's rate": (0.85, "assumed"),
    "seconds between nodes": (15e-6, "aws-neuron-sdk neuron-runtime/about/collectives.rst, EFA"),
    "part of collectives hidden by computation": (0.5, "assumed, as in cost/calibration.py"),
    "partition group": (128, "assumed: 16 bytes of states a weight are 12.5 GB a device"),
}
MACHINE = get_machine("p4d.24xlarge")
CLAIM, RANGE = 0.994, (0.989, 0.999)


def value(name: str) -> float:
    """One of the constants."""
    return CONSTANTS[name][0]


def step_seconds(devices: int, partition: int) -> float:
    """A step of `devices` in partition groups of `partition`."""
    layers, size = value("layers"), value("parameters") * value("bytes per weight and gradient")
    flops = value("FLOPs per weight and token") * value("parameters") * value("tokens per device and micro-batch")
    compute = flops / (value("share of peak in computation") * value("peak FLOPs"))
    inside = links.group(MACHINE, partition, 1)
    gather = layers * links.all_gather(size / layers, inside, MACHINE)
    scatter = layers * links.reduce_scatter(size / layers, inside, MACHINE)
    replicas = links.group(MACHINE, devices // partition, partition)
    boundary = links.all_reduce(size / partition, replicas, MACHINE)
    exposed = 1 - value("part of collectives hidden by computation")
    return value("micro-batches per step") * (compute + exposed * (2 * gather + scatter)) + boundary


def rows() -> list[dict[str, float]]:
    """Steps and weak-scaling efficiency of both, by the number of devices."""
    assert MACHINE.network_bytes_per_second == value("network bytes/s per node")
    assert MACHINE.latency.network_share == value("share of the network's rate")
    group, found = int(value("partition group")), []
    for devices in (128, 256, 384, 512):
        mics, zero = step_seconds(devices, group), step_seconds(devices, devices)
        first = found[0] if found else {"mics_seconds": mics, "zero_3_seconds": zero}
        row = {"devices": devices, "mics_seconds": mics, "zero_3_seconds": zero}
        row["mics_efficiency"] = first["mics_seconds"] / mics
        row["zero_3_efficiency"] = first["zero_3_seconds"] / zero
        found.append(row)
    return found


def main() -> None:
    """Print the table and the constants, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = rows()
    efficiency = found[-1]["mics_efficiency"]
    if options.json:
        constants = {name: {"value": number, "source": source} for name, (number, source) in CONSTANTS.items()}
        print(json.dumps({"rows": found, "published_efficiency": CLAIM, "constants": constants}, indent=2))
    else:
        print("devices   MiCS step, s   efficiency   ZeRO-3 step, s   efficiency   (all predicted)")
        for row in found:
            print(
                f"{row['devices']:7}   {row['mics_seconds']:12.2f}   {row['mics_efficiency']:10.2%}   "
                f"{row['zero_3_seconds']:14.2f}   {row['zero_3_efficiency']:10.2%}"
            )
        print(f"MiCS, 128 to 512 devices: predicted {efficiency:.2%}, published {CLAIM:.1%}")
        print("No congestion is modelled, which is what the paper's larger gains over ZeRO-3 come from. Constants:")
        for name, (number, source) in CONSTANTS.items():
            print(f"  {name}: {number:g} ({source})")
    if not RANGE[0] <= efficiency <= RANGE[1]:
        sys.exit(f"predicted efficiency {efficiency:.3f} is not within {RANGE}")


if __name__ == "__main__":
    main()
