"""Fine-tunes an encoder as a tagger of tokens, tensor-parallel: what is each name in a line of Python?

    torchrun --nproc-per-node 2 examples/finetune_token_classification.py --tensor_parallel_size 2

needs no network: it trains a small BERT and its tokenizer from scratch on the source of Python's own library, where a
name is a keyword, a function that is called, an attribute, an argument, or a plain name. With a model and a data set:

    torchrun --nproc-per-node 3 examples/finetune_token_classification.py --tensor_parallel_size 3 \
        --model google-bert/bert-base-cased --dataset lhoestq/conll2003 --tags_column ner_tags --learning_rate 5e-5
"""

import json
import keyword
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, List, Value, load_dataset
from finetune_clm import EXPECTED_ERRORS
from finetune_text_classification import FineTuningArguments, train_tokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    set_seed,
)

from optimum_trn import NeuronModelForTokenClassification, NeuronTrainer

MODULES = ("argparse", "ast", "bdb", "cmd", "configparser", "csv", "dataclasses", "difflib", "enum", "heapq", "inspect")
KINDS = ("other", "keyword", "call", "attribute", "argument", "name")


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(default=None, metadata={"help": "A Hub id or a local path; a small BERT by default."})
    dataset: str | None = field(default=None, metadata={"help": "A Hub id. Default: the source of Python's library."})
    tokens_column: str = field(default="tokens", metadata={"help": "The column with the words of a row."})
    tags_column: str = field(default="tags", metadata={"help": "The column with their classes."})
    max_length: int = field(default=64, metadata={"help": "Tokens in a row: longer ones are cut."})
    scratch_vocabulary: int = field(default=2048, metadata={"help": "Vocabulary size of the model from scratch."})


@dataclass
class TaggingArguments(FineTuningArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_token_classification")
    num_train_epochs: float = field(default=2)


def statements(module: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words of each statement of a module of Python's library, and the kind of each."""
    words: list[str] = []
    kinds: list[str] = []
    with tokenize.open(Path(sysconfig.get_path("stdlib"), f"{module}.py")) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.string.strip()]
    for index, token in enumerate(tokens[:-1]):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            before, after = tokens[index - 1].string, tokens[index + 1].string
            kind = "other"
            if token.type == tokenize.NAME:
                kind = "keyword" if keyword.iskeyword(token.string) else "name"
            if kind == "name" and after == "(":
                kind = "call"
            elif kind == "name" and before == ".":
                kind = "attribute"
            elif kind == "name" and after == "=" and before in ("(", ","):
                kind = "argument"
            words.append(token.string)
            kinds.append(kind)
        if tokens[index + 1].start[0] > token.end[0]:
            if len(words) >= 5:
                yield words, kinds
            words, kinds = [], []


def read_rows(example: ExampleArguments) -> tuple[Dataset, list[str]]:
    """Rows of words with their classes, and the names of these."""
    if example.dataset is not None:
        rows = load_dataset(example.dataset, split="train")
        return rows, rows.features[example.tags_column].feature.names
    found = [row for module in MODULES for row in statements(module)]
    columns = {example.tokens_column: [words for words, _ in found], example.tags_column: [kinds for _, kinds in found]}
    rows = Dataset.from_dict(columns).shuffle(seed=0).select(range(1200))
    rows = rows.cast_column(example.tags_column, List(ClassLabel(names=list(KINDS))))
    return rows, list(KINDS)


def encode(rows: Dataset, example: ExampleArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids of one length; the first token of each word has the word's class, the others are ignored."""

    def one(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            row[example.tokens_column], is_split_into_words=True, truncation=True, max_length=example.max_length
        )
        words = encoded.word_ids()
        first = [word is not None and word not in words[:place] for place, word in enumerate(words)]
        tags = row[example.tags_column]
        labels = [tags[word] if new else -100 for word, new in zip(words, first, strict=True)]
        return {**encoded, "labels": labels}

    encoded = rows.map(one, remove_columns=rows.column_names)
    return encoded.cast_column("labels", List(Value("int64")))


def load_model(example: ExampleArguments, arguments: TaggingArguments, rows: Dataset, names: list[str]) -> Any:
    """A tagger with a new head, its encoder pretrained or new, and its tokenizer."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if example.model is not None:
        model = NeuronModelForTokenClassification.from_pretrained(
            example.model, arguments.parallel_config, dtype=torch.float32, num_labels=len(names), **labels
        )
        return model, AutoTokenizer.from_pretrained(example.model)
    directory = str(Path(str(arguments.output_dir), "tokenizer"))
    with arguments.main_process_first(desc="tokenizer"):  # training it twice does not give the same one
        if arguments.process_index == 0:
            texts = [" ".join(words) for words in rows[example.tokens_column]]
            train_tokenizer(texts, example.scratch_vocabulary).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=max(example.max_length, 64),
        pad_token_id=tokenizer.pad_token_id,
        num_labels=len(names),
        **labels,
    )
    return NeuronModelForTokenClassification.from_config(config, arguments.parallel_config), tokenizer


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of the words whose class is right."""
    seen = prediction.label_ids != -100
    right = (np.argmax(prediction.predictions, axis=-1) == prediction.label_ids) & seen
    return {"accuracy": float(right.sum() / seen.sum())}


def main() -> None:
    example, arguments = HfArgumentParser((ExampleArguments, TaggingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    rows, names = read_rows(example)
    model, tokenizer = load_model(example, arguments, rows, names)
    split = encode(rows, example, tokenizer).train_test_split(0.2, seed=arguments.seed)
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorForTokenClassification(
            tokenizer, padding="max_length", max_length=example.max_length
        ),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        summary = {"labels": names, "losses": losses, "accuracy_before": before, "accuracy_after": after}
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"Accuracy {before:.3f} before, {after:.3f} after; saved in {arguments.output_dir}", flush=True)
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
