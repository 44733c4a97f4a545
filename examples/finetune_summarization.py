"""Fine-tunes an encoder-decoder that summarises, tensor-parallel: the first line of a docstring from all the others.

    torchrun --nproc-per-node 2 examples/finetune_summarization.py --tensor_parallel_size 2

needs no network: it trains a small T5 and its tokenizer from scratch on the docstrings of Python's own library, and
evaluates what it generates. With a model and a data set of your own:

    torchrun --nproc-per-node 2 examples/finetune_summarization.py --tensor_parallel_size 2 --learning_rate 1e-4 \
        --model google-t5/t5-small --dataset EdinburghNLP/xsum --text_column document --summary_column summary
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from finetune_clm import EXPECTED_ERRORS
from finetune_text_classification import PACKAGES, docstrings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    set_seed,
)

from optimum_trn import NeuronModelForSeq2SeqLM, NeuronSeq2SeqTrainer, NeuronSeq2SeqTrainingArguments


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(default=None, metadata={"help": "A Hub id or a local path; a small T5 by default."})
    dataset: str | None = field(
        default=None, metadata={"help": "A Hub id. Default: the docstrings of Python's library."}
    )
    text_column: str = field(default="text", metadata={"help": "The column with the text."})
    summary_column: str = field(default="summary", metadata={"help": "The column with its summary."})
    max_length: int = field(default=96, metadata={"help": "Tokens of a text: longer ones are cut, others padded."})
    max_summary: int = field(default=24, metadata={"help": "Tokens of a summary."})
    eval_rows: int = field(default=32, metadata={"help": "How many of the rows are kept for evaluation."})
    scratch_vocabulary: int = field(default=2048, metadata={"help": "Vocabulary size of the model from scratch."})


@dataclass
class SummarizationArguments(NeuronSeq2SeqTrainingArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_summarization")
    num_train_epochs: float = field(default=3)
    per_device_train_batch_size: int = field(default=16)
    per_device_eval_batch_size: int = field(default=16)
    learning_rate: float = field(default=3e-3)
    predict_with_generate: bool = field(default=True)
    generation_max_length: int | None = field(default=24)
    logging_steps: float = field(default=5)
    save_strategy: str = field(default="no")


def read_rows(example: ExampleArguments) -> Dataset:
    """A column of texts and one of their summaries."""
    if example.dataset is not None:
        return load_dataset(example.dataset, split="train")
    texts = dict.fromkeys(text for package in PACKAGES for text in docstrings(package))
    pairs = [text.partition(". ") for text in texts]
    pairs = [(body, summary) for summary, _, body in pairs if len(body) > 60 and len(summary) < 90]
    return Dataset.from_dict(
        {example.text_column: [body for body, _ in pairs], example.summary_column: [line for _, line in pairs]}
    )


def train_t5_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts that ends every text with </s>, as T5's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def load_model(example: ExampleArguments, arguments: SummarizationArguments, rows: Dataset) -> Any:
    """A pretrained model, or a small T5 with random weights, and its tokenizer."""
    if example.model is not None:
        model = NeuronModelForSeq2SeqLM.from_pretrained(example.model, arguments.parallel_config, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(example.model)
    directory = str(Path(str(arguments.output_dir), "tokenizer"))
    with arguments.main_process_first(desc="tokenizer"):  # training it twice does not give the same one
        if arguments.process_index == 0:
            texts = [*rows[example.text_column], *rows[example.summary_column]]
            train_t5_tokenizer(texts, example.scratch_vocabulary).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=96,
        d_kv=24,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return NeuronModelForSeq2SeqLM.from_config(config, arguments.parallel_config), tokenizer


def encode(rows: Dataset, example: ExampleArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids of texts and summaries, cut to the lengths that batches are padded to."""

    def several(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(batch[example.text_column], truncation=True, max_length=example.max_length)
        labels = tokenizer(text_target=batch[example.summary_column], truncation=True, max_length=example.max_summary)
        padding = [[-100] * (example.max_summary - len(tokens)) for tokens in labels["input_ids"]]
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": [tokens + rest for tokens, rest in zip(labels["input_ids"], padding, strict=True)],
        }

    return rows.map(several, batched=True, remove_columns=rows.column_names)


def overlap(tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """F1 of the words that a summary has in common with the right one (ROUGE-1 without stemming, Lin 2004)."""

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        scores = []
        for ours, right in zip(prediction.predictions, prediction.label_ids, strict=True):
            texts = [np.where(tokens < 0, tokenizer.pad_token_id, tokens) for tokens in (ours, right)]
            said, wanted = (Counter(tokenizer.decode(text, skip_special_tokens=True).lower().split()) for text in texts)
            common = sum((said & wanted).values())
            scores.append(2 * common / max(said.total() + wanted.total(), 1))
        return {"rouge1": float(np.mean(scores))}

    return metrics


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, SummarizationArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    rows = read_rows(example)
    model, tokenizer = load_model(example, arguments, rows)
    split = encode(rows, example, tokenizer).train_test_split(example.eval_rows, seed=arguments.seed)
    trainer = NeuronSeq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=example.max_length),
        processing_class=tokenizer,
        compute_metrics=overlap(tokenizer),
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
            "rouge1": after["eval_rouge1"],
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Evaluation loss {before['eval_loss']:.3f} before, {after['eval_loss']:.3f} after; ROUGE-1 "
            f"{before['eval_rouge1']:.3f} before, {after['eval_rouge1']:.3f} after",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
