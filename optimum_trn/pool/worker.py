"""A core that serves models of a pool: it loads what it is asked for, and forgets what it used least recently."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import OrderedDict
from typing import Any

import torch
from safetensors.torch import load, save
from transformers import PreTrainedModel

from ..device.runtime import empty_cache
from ..errors import StoreError
from ..modeling import NeuronModelForCausalLM, local_device
from ..store.frames import Answer, FrameServer, Session, text_of
from ..store.protocol import Operation
from .address import PoolAddress
from .client import Pool
from .streaming import stream_model


class Worker:
    """Runs requests on the core of this process, with at most `capacity` models resident."""

    def __init__(self, pool: Pool, capacity: int) -> None:
        self.pool = pool
        self.capacity = capacity
        self.resident: OrderedDict[str, PreTrainedModel] = OrderedDict()

    @torch.no_grad()
    def run(self, name: str, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
        """The logits of a causal language model, and what it took; `StoreError` as `stream_model`."""
        begin = time.perf_counter()
        hit = name in self.resident
        if not hit:
            while len(self.resident) >= self.capacity:
                self.resident.popitem(last=False)
            if local_device().type == "neuron":
                empty_cache()
            self.resident[name] = stream_model(name, NeuronModelForCausalLM, pool=self.pool).model.eval()
        self.resident.move_to_end(name)
        try:
            model = self.resident[name]
            logits = model(**{key: value.to(model.device) for key, value in inputs.items()}).logits
        except BaseException:
            del self.resident[name]  # which may not have come whole
            raise
        return {"hit": hit, "seconds": time.perf_counter() - begin}, logits.cpu().contiguous()


class WorkerServer(FrameServer):
    """Serves a worker; requests of all connections run one after the other."""

    def __init__(self, worker: Worker, token: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(token, host, port)
        self.worker = worker

    def session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WorkerSession:
        """What answers one connection."""
        return WorkerSession(self, self.worker, reader, writer)


class WorkerSession(Session):
    """One connection to a worker."""

    def __init__(
        self, server: FrameServer, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(server, reader, writer)
        self.worker = worker

    def answer(self, operation: Operation, meta: dict[str, Any], payload: bytes) -> Answer:
        """See `Operation`."""
        if operation is not Operation.INFER:
            raise StoreError(f"A worker is not asked for {operation.name}.")
        try:
            inputs = load(payload)
            took, logits = self.worker.run(text_of(meta["model"]), inputs)
        except StoreError:
            raise
        except Exception as error:  # of the model or its inputs: the request's fault, not the end of the worker
            raise StoreError(f"{type(error).__name__}: {error}") from error
        return took, [memoryview(save({"logits": logits}))]


async def serve(capacity: int) -> None:
    """Serve until the standard input is closed; prints the port in the first line."""
    address = PoolAddress.load()
    with Pool(address) as pool:
        async with WorkerServer(Worker(pool, capacity), address.token) as server:
            print(server.port, flush=True)
            closed = asyncio.Event()
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
            await closed.wait()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    asyncio.run(serve(int(sys.argv[1])))
