"""The job of benchmarks/survival.py: a tiny Llama, on the nodes of `optimum-trn launch` or the ranks of torchrun."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from optimum_trn import NeuronTrainer, NeuronTrainingArguments

VOCABULARY = 97


class Samples(Dataset):
    """Sequences that follow from their numbers."""

    def __len__(self):
        return 512

    def __getitem__(self, number):
        tokens = torch.randint(VOCABULARY, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Writes when each step was done, of the first rank, in seconds of the monotonic clock."""

    def __init__(self, file):
        self.file = file

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with self.file.open("a") as clock:
                clock.write(f"{state.global_step} {time.monotonic()} {os.getpid()}\n")


class Pause(TrainerCallback):
    """After a step, waits for a file: until then a node may come back, which itself does not wait."""

    def __init__(self, trainer, step, file):
        self.trainer = trainer
        self.step = step
        self.file = file

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.trainer.engine.catching_up(self.step):
            while not self.file.exists():
                time.sleep(0.02)


def model(dropout, tied):
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=dropout,
            attn_implementation="eager",
            tie_word_embeddings=tied,
        )
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minimum-nodes", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--pause-at", type=int, default=0, help="the step after which to wait for a file named go")
    parser.add_argument("--torchrun", action="store_true", help="stock Trainer, data-parallel, with checkpoints")
    options = parser.parse_args()
    arguments = {
        "output_dir": str(options.directory / "model"),
        "per_device_train_batch_size": 2,
        "max_steps": options.steps,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps" if options.save_steps else "no",
        "save_steps": options.save_steps or 500,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    if options.torchrun:
        arguments |= {"use_cpu": True, "ddp_backend": "gloo"}
        trainer = Trainer(
            model(options.dropout, not options.untied), TrainingArguments(**arguments), train_dataset=Samples()
        )
    else:
        arguments |= {"gradient_accumulation_steps": options.micro_batches, "minimum_nodes": options.minimum_nodes}
        trainer = NeuronTrainer(
            model(options.dropout, not options.untied), NeuronTrainingArguments(**arguments), train_dataset=Samples()
        )
    if options.pause_at:
        trainer.add_callback(Pause(trainer, options.pause_at, options.directory / "go"))
    trainer.add_callback(Clock(options.directory / "clock"))
    checkpoints = list((options.directory / "model").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(checkpoints))
    trainer.save_model()


if __name__ == "__main__":
    main()
