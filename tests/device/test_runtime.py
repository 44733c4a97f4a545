"""`torch.neuron`: its API, which core a process gets, the launch rules, and the errors of the hardware."""

import os
import subprocess
import sys

import pytest
import torch

from optimum_trn import hardware
from optimum_trn.device import runtime

API = """
is_available device_count current_device set_device device get_device_name get_device_properties synchronize
Stream Event stream StreamContext current_stream default_stream set_stream empty_cache memory_allocated
max_memory_allocated
memory_reserved max_memory_reserved memory_stats memory_summary reset_peak_memory_stats reset_accumulated_memory_stats
manual_seed manual_seed_all seed initial_seed get_rng_state get_rng_state_all set_rng_state set_rng_state_all
is_bf16_supported _is_in_bad_fork is_initialized get_amp_supported_dtype _lazy_init _initialized
""".split()


def script(text, **environment):
    """Output and error output of a fresh process, and its exit code."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "OPTIMUM_TRN_", "LOCAL_"))}
    done = subprocess.run(
        [sys.executable, "-c", text], env={**plain, **environment}, capture_output=True, text=True, timeout=300
    )
    return done.stdout.strip(), done.stderr.strip(), done.returncode


@pytest.mark.parametrize("name", API)
def test_the_module_has_the_whole_api(name):
    assert hasattr(torch.neuron, name)


def test_devices():
    assert torch.neuron.device_count() == 4
    current = torch.neuron.current_device()
    other = (current + 1) % 4
    with torch.neuron.device(other):
        assert torch.neuron.current_device() == other
        assert torch.empty(1, device="neuron").device.index == other
    assert torch.neuron.current_device() == current
    with torch.neuron.device(None):
        assert torch.neuron.current_device() == current
    assert torch.neuron.get_device_name(1) == "neuron:1"
    properties = torch.neuron.get_device_properties("neuron:1")
    assert properties.total_memory == 24 * 2**30 and "Trainium2" in properties.name
    with pytest.raises(ValueError, match=r"Invalid device id: 4. Valid range is 0 to 3"):
        torch.neuron.set_device(4)
    with pytest.raises(ValueError, match="neuron device"):
        torch.neuron.memory_allocated("cpu")


def test_memory():
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    block = torch.empty(1 << 20, device="neuron")
    assert torch.neuron.memory_allocated() - before == 4 << 20
    del block
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.max_memory_allocated() - before >= 4 << 20
    assert torch.neuron.max_memory_reserved() >= torch.neuron.memory_reserved() >= before
    torch.neuron.empty_cache()
    free, total = torch.neuron.mem_get_info()
    assert free <= total == 24 * 2**30
    assert "24 GiB" in torch.neuron.memory_summary()
    assert torch.neuron.memory_stats()["allocated_bytes.all.peak"] >= 4 << 20


def test_random_state():
    torch.manual_seed(7)
    state = torch.neuron.get_rng_state()
    assert state.dtype == torch.uint8 and state.numel() == 16
    first = torch.rand(3, device="neuron")
    torch.neuron.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="neuron"))
    torch.neuron.manual_seed(7)
    assert torch.neuron.initial_seed() == 7
    assert torch.equal(first, torch.rand(3, device="neuron"))
    everything = torch.neuron.get_rng_state_all()
    torch.rand(3, device="neuron")
    torch.neuron.set_rng_state_all(everything)
    assert len(everything) == 4 and torch.equal(everything[0], torch.neuron.get_rng_state(0))
    with torch.random.fork_rng(devices=[0], device_type="neuron"):
        inside = torch.rand(3, device="neuron:0")
    assert torch.equal(inside, torch.rand(3, device="neuron:0"))


def test_streams_are_names_only():
    side = torch.neuron.Stream(priority=-1)
    with torch.neuron.stream(side):
        assert torch.neuron.current_stream() == side
        event = torch.neuron.Event()
        event.record()
    assert torch.neuron.current_stream() == torch.neuron.default_stream()
    event.synchronize()
    assert event.query() and side.query()
    torch.neuron.synchronize()


# ------------------------------------------------------------------------------- what the environment asks for


@pytest.fixture
def environment(monkeypatch):
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "OPTIMUM_TRN_INSTANCE", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({}, (0, 1, 2, 3)),
        ({"NEURON_RT_VISIBLE_CORES": "2"}, (2,)),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, (0, 1, 2, 3)),
        ({"NEURON_RT_NUM_CORES": "1"}, (0,)),
        ({"NEURON_RT_NUM_CORES": "0"}, (0, 1, 2, 3)),
        ({"NEURON_RT_NUM_CORES": "1", "NEURON_RT_VISIBLE_CORES": "3"}, (3,)),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, tuple(range(8))),
        ({"OPTIMUM_TRN_INSTANCE": "trn2.48xlarge"}, tuple(range(64))),
        ({"OPTIMUM_TRN_INSTANCE": "trn2.48xlarge", "NEURON_RT_VISIBLE_CORES": "16-31"}, tuple(range(16, 32))),
        ({"OPTIMUM_TRN_INSTANCE": "trn1.32xlarge", "NEURON_RT_NUM_CORES": "8"}, tuple(range(8))),
    ],
)
def test_visible_cores(environment, variables, cores):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert runtime.visible_cores() == cores


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NEURON_RT_NUM_CORES": "2"}, "takes 1 or 4 cores"),
        ({"NEURON_RT_NUM_CORES": "3"}, "but 3 starting at core 0"),
        ({"NEURON_RT_VISIBLE_CORES": "4"}, r"NeuronCore\(s\) not available - Requested:nc4-nc4 Available:4"),
        ({"NEURON_RT_VISIBLE_CORES": "2-5", "OPTIMUM_TRN_INSTANCE": "trn2.48xlarge"}, "multiple of that count"),
        ({"NEURON_RT_VISIBLE_CORES": "a"}, "not a core list"),
        ({"NEURON_RT_VISIBLE_CORES": "1,1"}, "twice"),
        ({"OPTIMUM_TRN_INSTANCE": "trn9"}, "known are trn1.2xlarge"),
        ({"NEURON_LOGICAL_NC_CONFIG": "3"}, "1 or 2 physical cores, not 3"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2", "OPTIMUM_TRN_INSTANCE": "trn1.2xlarge"}, "1 physical cores, not 2"),
    ],
)
def test_what_the_hardware_would_not_launch(environment, variables, text):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=text):
        runtime.visible_cores()


def test_the_core_is_the_local_rank_and_an_unlaunchable_world_is_logged_once(environment, caplog):
    environment.setenv("LOCAL_RANK", "0")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    assert runtime._local_core(4) == 0
    assert "could not be launched on trn2.3xlarge, where a job takes 1 or 4" in caplog.text
    caplog.clear()
    environment.setenv("LOCAL_RANK", "1")
    assert runtime._local_core(4) == 1 and caplog.text == "", "one rank of the host says it"
    environment.setenv("LOCAL_WORLD_SIZE", "4")
    assert runtime._local_core(4) == 1 and caplog.text == ""
    environment.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(RuntimeError, match="5 local processes, but trn2.3xlarge shows 4"):
        runtime._local_core(4)
    environment.setenv("NEURON_RT_VISIBLE_CORES", "3")
    assert runtime._local_core(1) == 0, "each process was given its own core"


def test_nothing_exists_before_first_use_and_every_thread_has_the_process_core():
    text = """
import os, threading, optimum_trn, torch
before = len(os.listdir("/proc/self/fd")), threading.active_count(), torch.neuron.is_initialized()
torch.manual_seed(5)
assert torch.neuron.device_count() == 4 and not torch.neuron.is_initialized()
assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before[:2]
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device="neuron").device.index))
thread.start(); thread.join()
assert torch.neuron.initial_seed() == 5, "the seed from before first use holds"
print(before[2], seen, torch.neuron.current_device(), torch.neuron.is_initialized())
"""
    out, err, code = script(text, LOCAL_RANK="2", LOCAL_WORLD_SIZE="4")
    assert (out, code) == ("False [2] 2 True", 0), err


def test_trn1_says_what_its_hardware_runs():
    out, err, code = script(
        "import optimum_trn, torch; "
        "print(torch.ones(1, device='neuron').item(), torch.neuron.get_device_properties().total_memory)",
        OPTIMUM_TRN_INSTANCE="trn1.2xlarge",
    )
    assert out == f"1.0 {16 * 2**30}" and code == 0
    assert "PyTorch/XLA drives" in err


def test_a_child_forked_after_first_use_gets_the_hardware_error():
    text = """
import os, sys, optimum_trn, torch
torch.ones(1, device="neuron")
if os.fork() == 0:
    torch.manual_seed(0)  # DataLoader workers do this
    assert torch.neuron._is_in_bad_fork()
    for call in (torch.neuron.current_device, lambda: torch.ones(1, device="neuron")):
        try:
            call()
            print("no error")
        except RuntimeError as error:
            print(error)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    out, err, code = script(text)
    expected = (
        "Cannot re-initialize Neuron runtime in forked subprocess. To use Neuron with multiprocessing, "
        "use the 'spawn' start method"
    )
    assert code == 0 and out.splitlines() == [expected] * 2, (out, err)


def test_every_number_of_the_hardware_has_a_source():
    for spec in hardware.INSTANCES.values():
        assert spec.source and spec.chip.source
        assert spec.num_cores() in spec.launchable_cores and 1 in spec.launchable_cores
    assert hardware.get_instance(hardware.DEFAULT_INSTANCE).chip.hbm_bytes_per_core() == 24 * hardware.GiB
    assert hardware.TRAINIUM1.bf16_flops_per_core() == 95e12
