"""Direct preference optimization with TRL, tensor-parallel: text that goes on is preferred to text in disorder.

    torchrun --nproc-per-node 2 examples/finetune_dpo.py --tensor_parallel_size 2

needs no network (`pip install "optimum_trn[trl]"`): it trains the small model of finetune_clm.py first. The policy and
the frozen reference model are both sharded. With a model and preferences of your own:

    torchrun --nproc-per-node 3 examples/finetune_dpo.py --tensor_parallel_size 3 \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset trl-lib/ultrafeedback_binarized --learning_rate 1e-6
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from finetune_clm import (
    EXPECTED_ERRORS,
    ExampleArguments,
    FineTuningArguments,
    make_model_from_scratch,
    reference_texts,
)
from transformers import AutoTokenizer, HfArgumentParser, set_seed

from optimum_trn import NeuronDPOConfig, NeuronDPOTrainer, NeuronModelForCausalLM


@dataclass
class PreferenceArguments(NeuronDPOConfig):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_dpo")
    max_steps: int = field(default=20)
    per_device_train_batch_size: int = field(default=8)
    learning_rate: float = field(default=1e-4)
    max_length: int | None = field(default=128)
    bf16: bool = field(default=False)
    logging_steps: float = field(default=1)
    save_strategy: str = field(default="no")


def read_preferences(example: ExampleArguments, seed: int) -> Dataset:
    """Columns `prompt`, `chosen` and `rejected`: how a text goes on, and the same words in disorder, by default."""
    if example.dataset is not None:
        return load_dataset(example.dataset, example.dataset_config, split=example.dataset_split)
    order = random.Random(seed)
    rows = []
    for text in reference_texts()[1::2]:
        words = text.split()[:48]
        if len(words) == 48:
            shuffled = order.sample(words[16:], 32)
            rows.append(
                {
                    "prompt": " ".join(words[:16]),
                    "chosen": " " + " ".join(words[16:]),
                    "rejected": " " + " ".join(shuffled),
                }
            )
    return Dataset.from_list(rows)


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, PreferenceArguments)).parse_args_into_dataclasses()
    degrees = arguments.parallel_config
    own = FineTuningArguments(output_dir=arguments.output_dir, tensor_parallel_size=degrees.tensor_parallel_size)
    name = example.model or make_model_from_scratch(example, own)
    set_seed(arguments.seed)
    pairs = read_preferences(example, arguments.seed).train_test_split(example.eval_rows, seed=arguments.seed)
    trainer = NeuronDPOTrainer(
        model=NeuronModelForCausalLM.from_pretrained(name, degrees, dtype=torch.float32),
        ref_model=NeuronModelForCausalLM.from_pretrained(name, degrees, dtype=torch.float32),
        args=arguments,
        train_dataset=pairs["train"],
        eval_dataset=pairs["test"],
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        summary = {
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "eval_loss_before": before["eval_loss"],
            "eval_loss_after": after["eval_loss"],
            "accuracy": after["eval_rewards/accuracies"],
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Loss {before['eval_loss']:.4f} before, {after['eval_loss']:.4f} after; in {summary['accuracy']:.0%} of "
            "the pairs kept for evaluation the text that goes on is preferred",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
