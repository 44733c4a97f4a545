"""Fine-tunes a causal language model, tensor-parallel, on text packed to a fixed length.

    torchrun --nproc-per-node 2 examples/finetune_clm.py --tensor_parallel_size 2

needs no network: it trains a small tokenizer and a small model from scratch on the reference text that comes with
Python, saves it, and fine-tunes what it saved. With a model and a data set of your own:

    torchrun --nproc-per-node 3 examples/finetune_clm.py --tensor_parallel_size 3 \
        --model HuggingFaceTB/SmolLM2-135M --dataset wikitext --dataset_config wikitext-2-raw-v1 --learning_rate 2e-5
"""

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)

from optimum_trn import NeuronModelForCausalLM, NeuronTrainer, NeuronTrainingArguments
from optimum_trn.errors import (
    CheckpointError,
    MeshError,
    NeuronOutOfMemoryError,
    PlanError,
    UnsupportedModelError,
)

FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
END_OF_TEXT = "<|endoftext|>"
# What a user gets wrong: reported in one paragraph, on every rank.
EXPECTED_ERRORS = (CheckpointError, MeshError, NeuronOutOfMemoryError, PlanError, UnsupportedModelError, OSError)


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(
        default=None, metadata={"help": "A Hub id or a local path. Without it, a small model is trained from scratch."}
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "A Hub id or a .txt, .json, .jsonl, .csv or .parquet file. Default: Python's reference."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of a data set on the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "The split of it."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    block_size: int = field(default=128, metadata={"help": "Tokens in a row: texts are joined and cut to this length."})
    eval_rows: int = field(default=16, metadata={"help": "How many of the rows are kept for evaluation."})
    scratch_steps: int = field(default=240, metadata={"help": "Optimizer steps of the model made from scratch."})
    scratch_vocabulary: int = field(default=2048, metadata={"help": "Its vocabulary size."})


@dataclass
class FineTuningArguments(NeuronTrainingArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_clm")
    max_steps: int = field(default=40)
    per_device_train_batch_size: int = field(default=8)
    learning_rate: float = field(default=1e-3)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=5)
    logging_steps: float = field(default=1)
    save_strategy: str = field(default="no")


def read_texts(example: ExampleArguments) -> Dataset:
    """The texts to fine-tune on; the other half of Python's reference if nothing else is asked for."""
    if example.dataset is None:
        return Dataset.from_dict({example.text_column: reference_texts()[1::2]})
    format = FILE_FORMATS.get(Path(example.dataset).suffix)
    if format is None:
        return load_dataset(example.dataset, example.dataset_config, split=example.dataset_split)
    if not Path(example.dataset).is_file():
        raise FileNotFoundError(f"There is no file {example.dataset}: give --dataset an existing one, or a Hub id.")
    options = {"sample_by": "document"} if format == "text" else {}
    return load_dataset(format, data_files=example.dataset, split="train", **options)


def reference_texts() -> list[str]:
    """What `help()` of the Python interpreter knows, about 460 kB, in a fixed order."""
    return [topics[name] for name in sorted(topics)]


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerBase, column: str, length: int) -> Dataset:
    """All texts, one after the other, cut into rows of `length` tokens; what is left at the end is dropped."""
    if column not in texts.column_names:
        raise OSError(f"The data set has the columns {texts.column_names}, none of them {column}: set --text_column.")
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    encoded = tokenizer(list(texts[column]), add_special_tokens=False, verbose=False)["input_ids"]
    tokens = [token for text in encoded for token in [*text, *end]]
    rows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if not rows:
        raise OSError(f"The text has {len(tokens)} tokens, fewer than one row of {length}: lower --block_size.")
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def make_model_from_scratch(example: ExampleArguments, arguments: FineTuningArguments) -> str:
    """Train a small tokenizer and a small Llama on one half of Python's reference; returns where they are saved."""
    directory = str(Path(str(arguments.output_dir), "from_scratch"))
    texts = reference_texts()[0::2]
    tokenizer = train_tokenizer(texts, example.scratch_vocabulary)
    config = LlamaConfig(
        vocab_size=example.scratch_vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    arguments = dataclasses.replace(
        arguments, output_dir=directory, max_steps=example.scratch_steps, learning_rate=3e-3, logging_steps=10
    )
    set_seed(arguments.seed)
    trainer = NeuronTrainer(
        model=NeuronModelForCausalLM.from_config(config, parallel_config=arguments.parallel_config),
        args=arguments,
        train_dataset=pack(Dataset.from_dict({"text": texts}), tokenizer, "text", example.block_size),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return directory


def peak_hbm_bytes() -> list[int]:
    """The peak memory of every NeuronCore of this run since it was last reset; nothing where the device is the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    peaks = [torch.accelerator.max_memory_allocated()]
    if dist.is_initialized():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, peaks[0])
        peaks = everywhere
    return peaks


def main() -> None:
    parser = HfArgumentParser((ExampleArguments, FineTuningArguments))
    example, arguments = parser.parse_args_into_dataclasses()
    name = example.model or make_model_from_scratch(example, arguments)

    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = pack(read_texts(example), tokenizer, example.text_column, example.block_size)
    rows = rows.train_test_split(min(example.eval_rows, len(rows) // 2), seed=arguments.seed)
    model = NeuronModelForCausalLM.from_pretrained(name, parallel_config=arguments.parallel_config, dtype=torch.float32)
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    peaks = peak_hbm_bytes()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    if trainer.is_world_process_zero():
        summary = {
            "model": name,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "world_size": arguments.world_size,
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "eval_loss_before": before,
            "eval_loss_after": after,
            "train_seconds": seconds,
            "peak_hbm_bytes": peaks,
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"Evaluation loss {before:.4f} before, {after:.4f} after; saved in {arguments.output_dir}", flush=True)
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
