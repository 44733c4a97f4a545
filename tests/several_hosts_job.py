"""A training job over several nodes, started by tests/test_several_hosts.py through torchrun: prints its losses."""

import json
import sys

import torch
import torch.distributed as dist

from optimum_trn import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.parallel.topology import launched_topology, placement_summary
from tests.models.tiny import tiny_model

ROWS, LENGTH, STEPS = 8, 12, 3


def train(output_dir: str, **arguments: object) -> tuple[NeuronTrainer, list[float]]:
    """Fine-tune a tiny Llama; returns the loss of every step."""
    torch.manual_seed(0)
    model = tiny_model("llama", torch.float32)
    tokens = torch.randint(2, model.config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    options = {
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "learning_rate": 0.01,
    }
    args = NeuronTrainingArguments(output_dir, disable_tqdm=True, **{**options, **arguments})  # type: ignore[arg-type]
    trainer = NeuronTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main() -> None:
    output_dir, arguments = sys.argv[1], json.loads(sys.argv[2])
    trainer, losses = train(output_dir, **arguments)
    world_size = dist.get_world_size()
    topology = launched_topology(world_size)
    summary = placement_summary(trainer.parallel_config, topology)
    if dist.get_rank() == 0:
        result = json.dumps({"losses": losses, "nodes": topology.nodes, "placement": summary})
        print(f"RESULT {result}\n", end="", flush=True)  # in one piece: all ranks write to the same pipe
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
