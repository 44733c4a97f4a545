"""Jobs that share a NeuronCore and a pool: training makes way for an evaluation, and two cores serve six models.

    python examples/share_cores.py --output_dir /tmp/shared

needs no network. It starts a pool of two stores that lends one core, and puts six small models there. A training job
borrows the core; after its fifth step an evaluation job of a higher priority asks for it, so that training copies its
state to the host, waits, and goes on: with the losses of a run that nobody disturbed. Then two workers answer fifty
requests that alternate between the six models, while a store is killed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from optimum_trn import NeuronModelForCausalLM, NeuronTrainer, NeuronTrainingArguments
from optimum_trn.pool import Dispatcher, Pool, PoolAddress, YieldCores, lease, lend, put_directory, stream_model
from optimum_trn.pool.serve import PoolProcesses
from optimum_trn.pool.serving import worker_processes
from optimum_trn.store import StoreClient
from optimum_trn.store.protocol import Operation

IDS = torch.arange(32).reshape(2, 16)
MODELS, REQUESTS = 6, 50


def small_model(seed: int) -> GPT2LMHeadModel:
    """A GPT-2 with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.values.append(logs["loss"])


class StartEvaluation(TrainerCallback):
    """Starts the evaluation job after the fifth step and waits until it asks for the core."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.process: subprocess.Popen | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step != 5 or self.process is not None:
            return
        command = [sys.executable, __file__, "--role", "evaluate", "--output_dir", str(self.output_dir)]
        self.process = subprocess.Popen(command)
        address = PoolAddress.load()
        with StoreClient(*address.scheduler, address.token) as client:
            while not client.ask(Operation.METRICS, {})["waiting"]:
                assert self.process.poll() is None, "the evaluation job has ended before it asked for a core"
                time.sleep(0.02)


def train(directory: Path, callbacks: list[TrainerCallback]) -> list[float]:
    """Twenty steps of a small GPT-2."""
    model = small_model(100)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (80, 32))]
    losses = Losses()
    arguments = NeuronTrainingArguments(
        output_dir=str(directory),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    NeuronTrainer(model=model, args=arguments, train_dataset=data, callbacks=[losses, *callbacks]).train()
    return losses.values


def evaluate(output_dir: Path) -> None:
    """The other job: borrows the core, streams a model from the pool, and computes a loss."""
    with lease(cores=1, job="evaluation", priority=1):
        model = stream_model("model-0", NeuronModelForCausalLM).model.eval()
        with torch.no_grad():
            loss = model(IDS.to(model.device), labels=IDS.to(model.device)).loss.item()
    (output_dir / "evaluation.json").write_text(json.dumps({"loss": loss}))


def serve(output_dir: Path, pool: Pool, pids: list[int]) -> dict:
    """Fifty requests over six models on two cores; a store is killed after the tenth."""
    with worker_processes(2, capacity=2) as workers:
        places = [place for place, _ in workers]
        with Dispatcher(places, pool.address.token, capacity=2) as dispatcher:
            names = [f"model-{number % MODELS}" for number in range(REQUESTS)]
            results = [dispatcher.submit(name, input_ids=IDS) for name in names]
            results[10].result(120)
            os.kill(pids[1], signal.SIGKILL)
            for name, result in zip(names, results, strict=True):
                expected = GPT2LMHeadModel.from_pretrained(output_dir / name).eval()
                with torch.no_grad():
                    torch.testing.assert_close(result.result(120), expected(IDS).logits, rtol=1e-4, atol=1e-4)
            in_order = all(order == sorted(order) for order in dispatcher.order)
            slowest = max(metrics.longest for metrics in dispatcher.metrics.values())
            hits = sum(metrics.hits for metrics in dispatcher.metrics.values())
    return {
        "answered": len(results),
        "by_core": [len(order) for order in dispatcher.order],
        "in_order": in_order,
        "hits": hits,
        "slowest_seconds": round(slowest, 3),
    }


def main() -> None:
    """Run the jobs and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--role", choices=("all", "evaluate"), default="all", help="of this process")
    options = parser.parse_args()
    output_dir: Path = options.output_dir
    if options.role == "evaluate":
        evaluate(output_dir)
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    os.environ["OPTIMUM_TRN_POOL"] = str(output_dir / "pool.json")
    with PoolProcesses(stores=2, memory=256 << 20, cores=1) as processes, Pool(processes.address) as pool:
        processes.address.save(os.environ["OPTIMUM_TRN_POOL"])
        for index in range(MODELS):
            small_model(index).save_pretrained(output_dir / f"model-{index}")
            put_directory(pool, output_dir / f"model-{index}", f"model-{index}", replicas=2)
        undisturbed = train(output_dir, [])
        with lend(1, "training", preemptible=True) as held:
            yielding, evaluation = YieldCores(held), StartEvaluation(output_dir)
            losses = train(output_dir, [evaluation, yielding])
            assert evaluation.process is not None and evaluation.process.wait(120) == 0
        summary = {
            "losses": losses,
            "same_losses_as_undisturbed": losses == undisturbed,
            "switch_seconds": [[round(seconds, 4) for seconds in both] for both in yielding.switches],
            "evaluation": json.loads((output_dir / "evaluation.json").read_text()),
            "serving": serve(output_dir, pool, processes.pids),
        }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
