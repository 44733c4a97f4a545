"""Starting and stopping: accelerate launch, notebook_launcher, Ctrl-C and SIGTERM."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks

REPORT = """
from accelerate import Accelerator
accelerator = Accelerator()
words = ["REPORT", accelerator.device, accelerator.num_processes, accelerator.distributed_type.value]
print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # in one piece: two processes write to the same pipe
if accelerator.num_processes > 1:
    import torch.distributed
    torch.distributed.destroy_process_group()
"""


def clean_environment(**changes):
    plain = {
        k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "OPTIMUM_TRN_", "LOCAL_", "ACCELERATE_"))
    }
    return {**plain, "OMP_NUM_THREADS": "1", **changes}


def run(*command, check=True, **environment):
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        raise
    done = subprocess.CompletedProcess(command, process.returncode, out, error)
    assert not check or done.returncode == 0, done.stderr[-6000:]
    return done


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def reports(text):
    return sorted(line for line in text.splitlines() if line.startswith("REPORT"))


@pytest.mark.parametrize(
    ("autoload", "options", "expected"),
    [
        ("1", ["--num_processes", "2"], ["REPORT neuron:0 2 MULTI_NEURON", "REPORT neuron:1 2 MULTI_NEURON"]),
        ("1", ["--num_processes", "1", "--gpu_ids", "3"], ["REPORT neuron 1 NO"]),
        ("0", ["--num_processes", "2"], ["REPORT cpu 1 NO"]),
    ],
    ids=["two cores", "one named core", "without autoload"],
)
def test_accelerate_launch(tmp_path, autoload, options, expected):
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    done = run(
        *("-m", "accelerate.commands.launch", *options, "--main_process_port", "0", script),
        OPTIMUM_TRN_AUTOLOAD=autoload,
        HF_HOME=str(tmp_path),
    )
    assert reports(done.stdout) == expected


def test_a_trainer_that_was_asked_for_more_than_the_launcher_started_says_so():
    from optimum_trn import ParallelConfig
    from optimum_trn.errors import MeshError

    with pytest.raises(MeshError, match="starts one process unless OPTIMUM_TRN_AUTOLOAD=1"):
        ParallelConfig(tensor_parallel_size=2).data_parallel_size(1)


def test_notebook_launcher_forks_before_first_use(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import optimum_trn\nfrom accelerate import notebook_launcher\n"
        f"def train():\n    exec({REPORT!r})\n"
        f"notebook_launcher(train, num_processes=2, use_port='{free_port()}')\n"
    )
    assert reports(run(script).stdout) == ["REPORT neuron:0 2 MULTI_NEURON", "REPORT neuron:1 2 MULTI_NEURON"]


def test_notebook_launcher_after_first_use_says_what_the_hardware_says(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import optimum_trn, torch\nfrom accelerate import notebook_launcher\ntorch.ones(1, device='neuron')\n"
        "def train():\n    torch.ones(1, device='neuron')\n"
        f"notebook_launcher(train, num_processes=2, use_port='{free_port()}')\n"
    )
    done = run(script, check=False)
    assert done.returncode != 0 and "Cannot re-initialize Neuron runtime in forked subprocess" in done.stderr


# ------------------------------------------------------------------------------------------------------------- stopping


def interrupted(rank, world_size):
    """Rank 0 gets Ctrl-C inside a collective that rank 1 has not called; the group is usable afterwards."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1, device="neuron")
    outcome = "joined"
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            dist.all_reduce(tensor)
        except KeyboardInterrupt:
            outcome = "interrupted"
        store.set("interrupted", "yes")
    else:
        store.wait(["interrupted"])
        dist.all_reduce(tensor)
    dist.barrier()
    return outcome, tensor.item()


def test_control_c_ends_a_wait_for_other_ranks():
    assert run_ranks(interrupted, 2) == [("interrupted", 2.0), ("joined", 2.0)]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_stopping_the_launcher_ends_every_rank(tmp_path, number):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import os, sys, time, pathlib, optimum_trn, torch, torch.distributed as dist\n"
        "dist.init_process_group('neuron')\n"
        "tensor = torch.ones(1, device='neuron')\n"
        "dist.all_reduce(tensor)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "dist.all_reduce(tensor) if dist.get_rank() == 0 else time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=clean_environment(),
        stderr=subprocess.PIPE,
    )
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert launcher.poll() is None, launcher.stderr.read().decode()[-4000:]
        time.sleep(0.1)
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    for file in files:
        assert not os.path.exists(f"/proc/{file.read_text()}"), "a rank outlived its launcher"
