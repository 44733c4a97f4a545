"""Fine-tunes low-rank adapters of a causal language model, tensor-parallel; only the adapters are trained and saved.

    torchrun --nproc-per-node 2 examples/finetune_lora.py --tensor_parallel_size 2

needs no network: it makes the small model of finetune_clm.py first. The model is sharded, the adapters are those of
stock PEFT, and so are the files that are saved: `peft.PeftModel.from_pretrained` loads them onto the stock model. With
a model and a data set of your own:

    torchrun --nproc-per-node 3 examples/finetune_lora.py --tensor_parallel_size 3 --rank 16 \
        --model HuggingFaceTB/SmolLM2-135M --dataset wikitext --dataset_config wikitext-2-raw-v1
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from finetune_clm import (
    EXPECTED_ERRORS,
    ExampleArguments,
    FineTuningArguments,
    make_model_from_scratch,
    pack,
    read_texts,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, HfArgumentParser, default_data_collator, set_seed

from optimum_trn import NeuronModelForCausalLM, NeuronTrainer


@dataclass
class AdapterArguments:
    """What the adapters are."""

    rank: int = field(default=8, metadata={"help": "The rank of the two factors of each adapter."})
    lora_alpha: int = field(default=16, metadata={"help": "Their product is scaled by lora_alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "The dropout rate before each adapter."})
    target_modules: str = field(
        default="all-linear", metadata={"help": "The layers to adapt: names with commas, or all but the output head."}
    )

    def config(self) -> LoraConfig:
        """As PEFT takes it."""
        names = self.target_modules
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=names if names == "all-linear" else names.split(","),
        )


@dataclass
class LoraArguments(FineTuningArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_lora")
    learning_rate: float = field(default=1e-2)


def main() -> None:
    parser = HfArgumentParser((ExampleArguments, AdapterArguments, LoraArguments))
    example, adapter, arguments = parser.parse_args_into_dataclasses()
    name = example.model or make_model_from_scratch(example, arguments)

    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = pack(read_texts(example), tokenizer, example.text_column, example.block_size)
    rows = rows.train_test_split(min(example.eval_rows, len(rows) // 2), seed=arguments.seed)
    model = NeuronModelForCausalLM.from_pretrained(name, parallel_config=arguments.parallel_config, dtype=torch.float32)
    trainer = NeuronTrainer(
        model=get_peft_model(model, adapter.config()),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    if trainer.is_world_process_zero():
        trained, everything = trainer.model.get_nb_trainable_parameters()
        summary = {
            "model": name,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "trainable_parameters": trained,
            "parameters": everything,
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "eval_loss_before": before,
            "eval_loss_after": after,
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Trained {trained:,} of {everything:,} parameters. Evaluation loss {before:.4f} before, {after:.4f} "
            f"after; the adapters are saved in {arguments.output_dir}",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
