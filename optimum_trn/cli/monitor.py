"""`optimum-trn monitor`: one line of JSON every few seconds, in the form of neuron-monitor's."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from optimum_trn.device.core_status import CoreStatus, running_cores
from optimum_trn.device.runtime import instance, logical_core_size

DEVICE_TYPES = {"Trainium1": ("trainium", "v2"), "Trainium2": ("trainium2", "v3"), "Trainium3": ("trainium3", "v4")}


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("monitor", help="report the running simulated cores as lines of JSON")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two lines (default: 5)")
    parser.add_argument("--lines", type=int, default=0, help="stop after so many lines (default: never)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print until Ctrl-C, or as many lines as were asked for."""
    written = 0
    try:
        while True:
            print(json.dumps(report(running_cores(), options.interval)), flush=True)
            written += 1
            if written == options.lines:
                return
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return


def report(cores: list[CoreStatus], period: float) -> dict[str, Any]:
    """What neuron-monitor reports (aws-neuron-sdk, tools/neuron-sys-tools/neuron-monitor-user-guide.rst, 2026-08-21).

    Everything is the simulator's on this host, `simulated` says so; what it has no counter for is left out.
    """
    spec, core_size = instance(), logical_core_size()
    device_type, core_version = DEVICE_TYPES[spec.chip.name]
    memory = _memory_info()
    return {
        "simulated": True,
        "neuron_runtime_data": [_runtime(core, period) for core in cores],
        "system_data": {
            "memory_info": {
                "period": period,
                "memory_total_bytes": memory["MemTotal"],
                "memory_used_bytes": memory["MemTotal"] - memory["MemAvailable"],
                "error": "",
            },
            "vcpu_usage": {"period": period, "average_usage": _load_of_the_host(), "error": ""},
        },
        "instance_info": {"instance_name": "simulated", "instance_type": spec.name, "error": ""},
        "neuron_hardware_info": {
            "neuron_device_type": device_type,
            "neuroncore_version": core_version,
            "neuron_device_count": spec.num_chips,
            "neuron_device_memory_size": spec.chip.hbm_bytes,
            "neuroncore_per_device_count": spec.chip.physical_cores,
            "logical_neuroncore_config": core_size,
            "error": "",
        },
    }


def _runtime(core: CoreStatus, period: float) -> dict[str, Any]:
    number = str(core.core)
    device_memory = {
        "constants": 0,
        "model_code": 0,
        "model_shared_scratchpad": 0,
        "runtime_memory": core.scratch_bytes,
        "tensors": core.tensor_bytes,
    }
    return {
        "pid": core.pid,
        "neuron_runtime_tag": core.command,
        "error": "",
        "report": {
            "neuroncore_counters": {
                "period": period,
                "neuroncores_in_use": {number: {"neuroncore_utilization": round(core.utilization, 2)}},
                "error": "",
            },
            "execution_stats": {
                "period": period,
                "error_summary": {
                    name: 0 for name in ("generic", "numerical", "transient", "model", "runtime", "hardware")
                },
                "execution_summary": {"completed": core.step},
                "latency_stats": {"total_latency": {"p50": core.step_seconds}},
                "error": "",
            },
            "memory_used": {
                "period": period,
                "neuron_runtime_used_bytes": {
                    "host": core.host_bytes,
                    "neuron_device": core.tensor_bytes + core.scratch_bytes,
                    "usage_breakdown": {
                        "host": {"application_memory": core.host_bytes},
                        "neuroncore_memory_usage": {number: device_memory},
                    },
                },
                "loaded_models": [],
                "error": "",
            },
        },
    }


def _memory_info() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


def _load_of_the_host() -> dict[str, float]:
    return {"load_of_last_minute_per_cpu": round(100 * os.getloadavg()[0] / (os.cpu_count() or 1), 2)}
