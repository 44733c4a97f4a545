"""Train a small Llama on six nodes, kill two of them on the way, and see that the loss curve does not know.

    python examples/survive_failures.py

Started like that, it runs itself twice with `optimum-trn launch`: once undisturbed, and once while it kills the process
of rank 0 after a few steps and another one later. Each node is one process on this machine, with a pipeline stage of
its own: 2 nodes have a copy of the model, so 6 have 3, and 2 may be lost at the same time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NODES, LOSSES, STEPS = 6, 2, 20
KILLS = {6: 0, 12: 3}  # after how many committed steps which node is killed


def train(output_dir: str) -> None:
    """What every node runs: a script for one process. A step is 6 batches of 2 rows, whoever computes them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from optimum_trn import NeuronTrainer, NeuronTrainingArguments

    torch.manual_seed(0)
    tokens = [torch.randint(1, 97, (1,)).repeat(16) for _ in range(512)]  # each row says one word again and again
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    args = NeuronTrainingArguments(
        output_dir,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=6,
        max_steps=STEPS,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        minimum_nodes=2,  # what the memory model says unless given: a model this small would fit one
    )
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = NeuronTrainer(LlamaForCausalLM(config), args, train_dataset=dataset)
    trainer.train()
    trainer.save_model()


def events(directory: Path, kind: str) -> list[dict]:
    """The events of that kind in the journal of a job."""
    journal = directory / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def run(directory: Path, kills: dict[int, int]) -> list[float]:
    """A job of six nodes, of which some are killed; the loss of every committed step."""
    command = [sys.executable, "-m", "optimum_trn.cli", "launch", "--nodes", str(NODES), "-f", str(LOSSES)]
    command += ["--directory", str(directory), __file__, "--train", str(directory / "model")]
    job = subprocess.Popen(command, env={"OPTIMUM_TRN_DEVICE": "cpu", **os.environ})
    for step, node in kills.items():
        while len(events(directory, "committed")) < step and job.poll() is None:
            time.sleep(0.01)
        pid = next((event["pid"] for event in events(directory, "started") if event["node"] == node), None)
        if pid is None or job.poll() is not None:
            break
        print(f"After step {step}: kill -9 {pid}, the process of node {node}.")
        os.kill(pid, signal.SIGKILL)
    if job.wait():
        raise SystemExit(f"The job has failed: see {directory}.")
    for event in events(directory, "lost"):
        after = next(c for c in events(directory, "committed") if c["monotonic"] > event["monotonic"])
        print(f"Node {event['node']} was lost; {after['monotonic'] - event['monotonic']:.2f} s to the next step.")
    return [sum(event["losses"]) for event in events(directory, "committed")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="DIRECTORY", help="be a node of the job (what the launcher runs)")
    parser.add_argument("--output-dir", type=Path, default=Path("survive_failures"))
    options = parser.parse_args()
    if options.train:
        return train(options.train)
    undisturbed = run(options.output_dir / f"undisturbed-{time.time():.0f}", {})
    disturbed = run(options.output_dir / f"disturbed-{time.time():.0f}", KILLS)
    top = max(undisturbed)
    print("\nstep  undisturbed  two nodes killed")
    for step, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True), start=1):
        bar = "#" * round(40 * other / top)
        print(f"{step:4}  {one:11.6f}  {other:16.6f}  {bar}{'  <- killed after it' if step in KILLS else ''}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(undisturbed, disturbed, strict=True)):.1e}")


if __name__ == "__main__":
    main()
