"""`ls`, `top` and `monitor` show the simulated devices and the processes on them, in the form of Neuron's tools."""

import dataclasses
import json
import os
import time

import pytest
import torch
from rich.console import Console

from optimum_trn.cli import main, monitor, top
from optimum_trn.device import core_status
from optimum_trn.device.core_status import CoreStatus, Reporter, running_cores
from optimum_trn.device.step_graphs import StepGraphs
from optimum_trn.hardware import GiB

STATUS = CoreStatus(
    pid=os.getpid(),
    command="train.py --some",
    instance="trn2.48xlarge",
    logical_core_size=2,
    core=6,
    rank=6,
    started=time.time(),
    updated=time.time() + 1e9,
    step=63,
    step_seconds=0.25,
    loss=2.5,
    utilization=87.5,
    tensor_bytes=6 * GiB,
    scratch_bytes=0,
    peak_bytes=7 * GiB,
    limit_bytes=24 * GiB,
    host_bytes=GiB,
    graphs=3,
    cache_hits=2,
    graph_breaks=1,
)


@pytest.fixture(autouse=True)
def no_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(core_status.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("OPTIMUM_TRN_INSTANCE", "trn2.48xlarge")
    return tmp_path


@pytest.fixture
def running():
    core_status.directory().mkdir(parents=True)
    file = core_status.directory() / f"{STATUS.pid}.json"
    file.write_text(json.dumps(dataclasses.asdict(STATUS)))
    return file


def test_ls_has_the_fields_of_neuron_ls_and_the_processes(running, capsys):
    main(["ls", "-j"])
    devices = json.loads(capsys.readouterr().out)
    assert len(devices) == 16
    assert devices[1] == {
        "neuron_device": 1,
        "bdf": "",
        "cpu_affinity": "",
        "numa_node": -1,
        "connected_to": [0, 2, 5, 13],
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 103079215104,
        "neuroncore_ids": [4, 5, 6, 7],
        "neuron_processes": [{"pid": os.getpid(), "command": "train.py --some", "neuron_runtime_version": "simulated"}],
    }
    assert all(not device["neuron_processes"] for device in devices if device["neuron_device"] != 1)


def test_links_go_both_ways(capsys):
    main(["ls", "-j"])
    devices = json.loads(capsys.readouterr().out)
    for device in devices:
        assert len(device["connected_to"]) == 4
        assert all(device["neuron_device"] in devices[other]["connected_to"] for other in device["connected_to"])


def test_ls_says_what_is_simulated_and_draws_the_torus(capsys):
    main(["ls", "-t"])
    text = capsys.readouterr().out
    assert "instance-type: trn2.48xlarge (simulated)" in text and "96 GiB" in text
    assert "↔ [ 4] ─ [ 5] ─ [ 6] ─ [ 7] ↔" in text


def test_top_shows_memory_step_and_loss(running):
    console = Console(width=200, file=open(os.devnull, "w"), record=True)
    console.print(top.table(running_cores()))
    text = console.export_text()
    for part in (
        "trn2.48xlarge nc6",
        "6.00/24 GiB",
        "7.00",
        "88%",
        "63",
        "0.250",
        "2.5000",
        "3 (2 cached)",
        "train.py",
    ):
        assert part in text


def test_top_looks_once_where_the_output_is_no_terminal(running, capsys):
    main(["top"])
    assert "1 simulated NeuronCores are running" in capsys.readouterr().out


def test_monitor_writes_lines_in_neuron_monitors_form(running, capsys):
    main(["monitor", "--lines", "1"])
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    (process,) = report["neuron_runtime_data"]
    inner = process["report"]
    assert inner["neuroncore_counters"]["neuroncores_in_use"]["6"]["neuroncore_utilization"] == 87.5
    used = inner["memory_used"]["neuron_runtime_used_bytes"]
    assert used["neuron_device"] == 6 * GiB
    assert used["usage_breakdown"]["neuroncore_memory_usage"]["6"]["tensors"] == 6 * GiB
    assert set(inner) == {"neuroncore_counters", "execution_stats", "memory_used"}
    assert report["instance_info"]["instance_type"] == "trn2.48xlarge" and report["simulated"] is True
    assert report["neuron_hardware_info"]["neuroncore_version"] == "v3"
    assert report["system_data"]["memory_info"]["memory_total_bytes"] > 0


def test_the_status_of_a_process_that_died_is_removed(running):
    gone = dataclasses.replace(STATUS, pid=2**22 + 1)
    file = running.with_name(f"{gone.pid}.json")
    file.write_text(json.dumps(dataclasses.asdict(gone)))
    assert [core.pid for core in running_cores()] == [os.getpid()]
    assert not file.exists() and running.exists()


def test_a_process_that_trains_shows_its_core():
    torch.neuron.init()
    graphs = StepGraphs("trn2")
    reporter = Reporter(graphs, "trn2.3xlarge", 2, core=1, device=0)
    assert running_cores() == [], "nothing is shown before the first step"
    held = torch.zeros(1 << 20, device="neuron")
    reporter.loss, graphs.steps = 0.5, 1
    reporter.step_ended()
    (core,) = running_cores()
    assert (core.pid, core.core, core.step, core.loss) == (os.getpid(), 1, 1, 0.5)
    assert core.tensor_bytes >= held.nbytes and core.limit_bytes == 24 * GiB and 0 <= core.utilization <= 100
    reporter.remove(os.getpid() + 1)
    assert running_cores() == [core], "a forked child leaves it"
    reporter.remove(os.getpid())
    assert running_cores() == []


def test_monitor_reports_nothing_where_nothing_runs():
    assert monitor.report([], 5.0)["neuron_runtime_data"] == []
