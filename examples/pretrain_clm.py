"""Pretrains a causal language model from random weights, tensor-parallel, with the architecture of any config.

    torchrun --nproc-per-node 2 examples/pretrain_clm.py --tensor_parallel_size 2

needs no network: a tokenizer is trained on the reference text that comes with Python, and then a small Llama. No rank
ever holds more than one weight whole. With the architecture of a model on the Hub, its tokenizer, and a data set:

    torchrun --nproc-per-node 3 examples/pretrain_clm.py --tensor_parallel_size 3 --recompute full \
        --config HuggingFaceTB/SmolLM2-135M --dataset wikitext --dataset_config wikitext-103-raw-v1 --block_size 1024
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from finetune_clm import (
    EXPECTED_ERRORS,
    ExampleArguments,
    FineTuningArguments,
    pack,
    read_texts,
    reference_texts,
    train_tokenizer,
)
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from optimum_trn import NeuronModelForCausalLM, NeuronTrainer


@dataclass
class PretrainingArguments(FineTuningArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/pretrain_clm")
    config: str | None = field(
        default=None, metadata={"help": "A Hub id or local path: its architecture and tokenizer, not its weights."}
    )
    max_steps: int = field(default=120)
    learning_rate: float = field(default=3e-3)
    weight_decay: float = field(default=0.1)


def architecture(
    example: ExampleArguments, arguments: PretrainingArguments, texts: list[str]
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """What to train, and the tokenizer: those of the config named, or a small Llama and a tokenizer of these texts."""
    if arguments.config is not None:
        return AutoConfig.from_pretrained(arguments.config), AutoTokenizer.from_pretrained(arguments.config)
    directory = str(Path(str(arguments.output_dir), "tokenizer"))
    with arguments.main_process_first(desc="tokenizer"):  # training it twice does not give the same one
        if arguments.process_index == 0:
            train_tokenizer(texts, example.scratch_vocabulary).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=max(example.block_size, 1024),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return config, tokenizer


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, PretrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    texts = read_texts(example) if example.dataset else Dataset.from_dict({example.text_column: reference_texts()})
    config, tokenizer = architecture(example, arguments, list(texts[example.text_column]))
    rows = pack(texts, tokenizer, example.text_column, example.block_size)
    rows = rows.train_test_split(min(example.eval_rows, len(rows) // 2), seed=arguments.seed)
    trainer = NeuronTrainer(
        model=NeuronModelForCausalLM.from_config(config, parallel_config=arguments.parallel_config),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    parameters = trainer.get_num_trainable_parameters()  # of the whole model: all ranks must ask
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        summary = {"parameters": parameters, "losses": losses, "eval_loss": loss}
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"Perplexity {math.exp(loss):.1f}; the model is saved in {arguments.output_dir}", flush=True)
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
