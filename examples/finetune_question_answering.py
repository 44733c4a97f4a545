"""Fine-tunes an encoder that marks the answer to a question in a text, tensor-parallel: what does this function do?

    torchrun --nproc-per-node 2 examples/finetune_question_answering.py --tensor_parallel_size 2

needs no network: it trains a small BERT and its tokenizer from scratch on a few functions of Python's own library at a
time, each with the first line of its docstring, which is the answer. With a model and a data set as SQuAD's:

    torchrun --nproc-per-node 3 examples/finetune_question_answering.py --tensor_parallel_size 3 --max_length 384 \
        --model google-bert/bert-base-cased --dataset rajpurkar/squad --learning_rate 3e-5 --num_train_epochs 2
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from finetune_clm import EXPECTED_ERRORS
from finetune_text_classification import PACKAGES, FineTuningArguments, train_tokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from optimum_trn import NeuronModelForQuestionAnswering, NeuronTrainer


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(default=None, metadata={"help": "A Hub id or a local path; a small BERT by default."})
    dataset: str | None = field(
        default=None, metadata={"help": "A Hub id; it has the columns of SQuAD. Default: Python's library."}
    )
    max_length: int = field(default=96, metadata={"help": "Tokens in a row: questions and texts are padded to it."})
    scratch_vocabulary: int = field(default=2048, metadata={"help": "Vocabulary size of the model from scratch."})


@dataclass
class AnsweringArguments(FineTuningArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_question_answering")
    num_train_epochs: float = field(default=3)


def functions(package: str) -> Iterator[tuple[str, str]]:
    """The functions of a package of Python's library, each with the first line of its docstring."""
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                first = text.splitlines()[0].strip()
                if 20 <= len(first) <= 60 and len(node.name) > 3:
                    yield node.name, first


def read_rows(example: ExampleArguments) -> Dataset:
    """Columns `question`, `context` and `answers`, whose `text` is in the context at `answer_start`."""
    if example.dataset is not None:
        return load_dataset(example.dataset, split="train")
    order = random.Random(0)
    found = sorted({name: line for package in PACKAGES for name, line in functions(package)}.items())
    order.shuffle(found)
    rows = []
    for start in range(0, len(found) - 2, 2):
        several = found[start : start + 3]
        context = " ".join(f"{name}: {line}" for name, line in several)
        for name, line in several:
            place = {"text": [line], "answer_start": [context.index(f"{name}: {line}") + len(name) + 2]}
            rows.append({"question": f"What does {name} do?", "context": context, "answers": place})
    return Dataset.from_list(rows)


def encode(rows: Dataset, example: ExampleArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids of one length, and where the answer starts and ends; rows whose answer is cut off are dropped."""

    def one(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            padding="max_length",
            max_length=example.max_length,
            return_token_type_ids=True,
        )
        first = row["answers"]["answer_start"][0]
        last = first + len(row["answers"]["text"][0]) - 1
        start, end = encoded.char_to_token(0, first, 1), encoded.char_to_token(0, last, 1)
        return {
            **encoded,
            "start_positions": -1 if start is None else start,
            "end_positions": -1 if end is None else end,
        }

    encoded = rows.map(one, remove_columns=rows.column_names)
    return encoded.filter(lambda row: row["start_positions"] >= 0 and row["end_positions"] >= 0)


def load_model(example: ExampleArguments, arguments: AnsweringArguments, rows: Dataset) -> Any:
    """A model with a new head, its encoder pretrained or new, and its tokenizer."""
    if example.model is not None:
        model = NeuronModelForQuestionAnswering.from_pretrained(
            example.model, arguments.parallel_config, dtype=torch.float32
        )
        return model, AutoTokenizer.from_pretrained(example.model)
    directory = str(Path(str(arguments.output_dir), "tokenizer"))
    with arguments.main_process_first(desc="tokenizer"):  # training it twice does not give the same one
        if arguments.process_index == 0:
            train_tokenizer([*rows["context"], *rows["question"]], example.scratch_vocabulary).save_pretrained(
                directory
            )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=max(example.max_length, 64),
        pad_token_id=tokenizer.pad_token_id,
    )
    return NeuronModelForQuestionAnswering.from_config(config, arguments.parallel_config), tokenizer


def exact_match(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of the answers whose start, and whose start and end, are right."""
    starts, ends = (np.argmax(logits, axis=-1) for logits in prediction.predictions[:2])
    right_starts, right_ends = starts == prediction.label_ids[0], ends == prediction.label_ids[1]
    return {"start": float(right_starts.mean()), "exact_match": float((right_starts & right_ends).mean())}


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, AnsweringArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    rows = read_rows(example)
    model, tokenizer = load_model(example, arguments, rows)
    split = encode(rows, example, tokenizer).train_test_split(0.2, seed=arguments.seed)
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
        compute_metrics=exact_match,
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
            "start": after["eval_start"],
            "exact_match": after["eval_exact_match"],
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Evaluation loss {before['eval_loss']:.3f} before, {after['eval_loss']:.3f} after; exact matches "
            f"{before['eval_exact_match']:.3f} before, {after['eval_exact_match']:.3f} after",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
