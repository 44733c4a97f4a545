"""A worker process of tests/distributed.py: takes one job after another and leaves no state between them."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import resolve


def run(job: dict[str, Any], backend: str) -> Any:
    """Initialise the default process group as torchrun would, and call the job's function."""
    rank, world_size = job["rank"], job["world_size"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the test process hosts the store, so no rank's death takes it away
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_RUN_ID="tests",
        **job["environment"],
    )
    torch.manual_seed(0)
    random.seed(0)
    function = resolve(job["module"], job["function"])
    dist.init_process_group(backend, timeout=timedelta(seconds=job["timeout"]))
    return function(rank, world_size, *job["args"], **job["kwargs"])


def clean_up() -> None:
    """Forget the process group and what accelerate remembers of it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if os.environ["OPTIMUM_TRN_DEVICE"] != "cpu":
        from optimum_trn.device.build import load_extension

        load_extension().allow_unsupported_types(False)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    gc.collect()


def main(address: str) -> None:
    """Serve jobs until the test process goes away."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection: Connection = Client(address, family="AF_UNIX")
    torch.set_num_threads(1)
    import optimum_trn  # noqa: F401  (installs the device)

    backend = "gloo" if os.environ["OPTIMUM_TRN_DEVICE"] == "cpu" else "neuron"
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        environment = dict(os.environ)
        try:
            answer: tuple[bool, Any] = (True, run(job, backend))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            message = pickle.dumps(answer)
        except Exception:
            message = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(message)
        connection.recv_bytes()  # every rank has answered, so nobody still needs this rank's sockets
        clean_up()
        os.environ.clear()
        os.environ.update(environment)


if __name__ == "__main__":
    main(sys.argv[1])
