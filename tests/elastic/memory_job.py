"""A training job with memory checkpoints, started as processes: agents by node, and workers that can be killed.

Run as a script it is one worker: it records a digest of the weights and optimizer of every rank after every step.
"""

import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
AGENT = (
    "import sys; from optimum_trn.elastic.agent import serve; from optimum_trn.checkpoint.agents import "
    "token_of_environment as t; serve(int(sys.argv[1]), t(), '127.0.0.1', 0, lambda a: print(a, flush=True))"
)


class Job:
    """`nodes` nodes of `per_node` workers and an agent each, all on this host; everything ends with `close`."""

    def __init__(self, directory, nodes, per_node, memory=1 << 30, **settings):
        self.directory, self.nodes, self.per_node, self.memory = Path(directory), nodes, per_node, memory
        self.settings = settings
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPTIMUM_TRN_DEVICE": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OPTIMUM_TRN_AGENT_TOKEN": secrets.token_hex(32),
            "PYTHONPATH": str(REPOSITORY),
        }
        self.agents = {}
        self.addresses = {}
        self.workers = []
        for node in range(nodes):
            self.start_agent(node)
        for node in range(nodes):
            self.addresses[node] = self.agents[node].stdout.readline().strip()

    def start_agent(self, node, wait=False):
        self.agents[node] = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(self.memory)],
            env=self.environment, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )  # fmt: skip
        if wait:
            self.addresses[node] = self.agents[node].stdout.readline().strip()

    def kill_agent(self, node):
        self.agents[node].kill()
        self.agents[node].wait()
        self.agents[node].stdout.close()

    def start_workers(self, steps, resume=None, stop_at=None):
        """Start all workers; they train `steps` steps, or wait to be killed once step `stop_at` is in memory."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = self.nodes * self.per_node
        settings = {"steps": steps, "resume": resume, "stop_at": stop_at, **self.settings}
        self.workers = []
        for rank in range(world):
            environment = {
                **self.environment,
                "OPTIMUM_TRN_AGENTS": ",".join(self.addresses[node] for node in range(self.nodes)),
                "RANK": str(rank), "LOCAL_RANK": str(rank % self.per_node), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(self.per_node), "GROUP_RANK": str(rank // self.per_node),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JOB_SETTINGS": json.dumps(settings),
            }  # fmt: skip
            log = (self.directory / f"worker-{rank}.log").open("ab")
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(self.directory)],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    cwd=REPOSITORY,
                )  # fmt: skip
            )
            log.close()

    def wait(self, timeout=300):
        deadline = time.monotonic() + timeout
        try:
            for rank, worker in enumerate(self.workers):
                code = worker.wait(max(1, deadline - time.monotonic()))
                assert code == 0, f"rank {rank}: {(self.directory / f'worker-{rank}.log').read_text()[-3000:]}"
        finally:
            self.kill_workers()

    def wait_until_stopped(self, timeout=300):
        """Until all workers say that they have come to the step at which they stop."""
        deadline = time.monotonic() + timeout
        stopped = [self.directory / f"stopped-{rank}" for rank in range(len(self.workers))]
        while not all(path.exists() for path in stopped):
            for rank, worker in enumerate(self.workers):
                text = (self.directory / f"worker-{rank}.log").read_text()[-3000:]
                assert worker.poll() is None, f"rank {rank} ended: {text}"
            assert time.monotonic() < deadline, "the workers do not come to their step"
            time.sleep(0.02)
        for path in stopped:
            path.unlink()

    def kill_workers(self):
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()

    def records(self, step):
        """The digests that the ranks recorded after a step, and when they resumed at it."""
        found = []
        for rank in range(self.nodes * self.per_node):
            lines = [json.loads(line) for line in (self.directory / f"digests-{rank}.jsonl").read_text().splitlines()]
            found.append([line for line in lines if line["step"] == step])
        return found

    def resumed(self):
        return [json.loads((self.directory / f"resumed-{rank}.json").read_text()) for rank in range(len(self.workers))]

    def close(self):
        self.kill_workers()
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()
            agent.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def digest(trainer):
    """Of everything that this rank trains with: weights, optimizer states, and random numbers to come."""
    import numpy
    import torch

    found = hashlib.sha256()
    optimizer = trainer._torch_optimizer
    states = [value for group in optimizer.state_dict()["state"].values() for _, value in sorted(group.items())]
    for value in [*trainer.model.state_dict().values(), *states]:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(numpy.random.get_state()[1].tobytes())
    return found.hexdigest()


def work(directory):
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

    from optimum_trn import NeuronTrainer, NeuronTrainingArguments

    settings = json.loads(os.environ["JOB_SETTINGS"])
    rank = int(os.environ["RANK"])
    directory = Path(directory)
    arguments = NeuronTrainingArguments(
        output_dir=str(directory / "output"),
        per_device_train_batch_size=1,
        max_steps=settings["steps"],
        save_strategy="steps" if settings.get("save_steps") else "no",
        save_steps=settings.get("save_steps", 500),
        logging_strategy="no",
        report_to=[],
        learning_rate=1e-3,
        memory_checkpoint_replicas=settings.get("replicas", 2),
        tensor_parallel_size=settings.get("tensor_parallel_size", 1),
        use_cpu=True,
    )
    set_seed(0)
    hidden = settings.get("hidden", 16)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=settings.get("vocabulary", 64), attention_dropout=0.1,
        )
    )  # fmt: skip
    tokens = torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    class Record(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step and not hasattr(self, "began"):
                self.began = time.time()
                line = {"step": state.global_step, "resumed": digest(trainer), "at": self.began}
                self.write(line)
            if state.global_step == settings["stop_at"]:
                trainer._settle_writing(wait=True)
                (directory / f"stopped-{rank}").touch()
                while True:
                    time.sleep(60)

        def on_step_end(self, args, state, control, **kwargs):
            self.write({"step": state.global_step, "digest": digest(trainer)})
            if trainer._writer is not None and not settings.get("skips"):
                while not trainer._writer.is_done:  # so that every step is in memory, whatever else the machine does
                    time.sleep(0.001)

        def write(self, line):
            with (directory / f"digests-{rank}.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    trainer = NeuronTrainer(model, arguments, train_dataset=data, callbacks=[Record()])
    began = time.time()
    trainer.train(settings["resume"])
    resumed = trainer.resumed
    (directory / f"resumed-{rank}.json").write_text(json.dumps({"began": began, **(vars(resumed) if resumed else {})}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1])
