"""Writes docs/arguments.md: what becomes of every argument and method of the pinned transformers' Trainer.

.venv/bin/python -m tests.trainer.argument_table
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from optimum_trn.trainer import NeuronTrainingArguments
from optimum_trn.trainer.refusals import REFUSALS

HERE = Path(__file__).parent
TABLE = HERE / "arguments.yaml"
PAGE = HERE.parent.parent / "docs" / "arguments.md"
SAME = "As in transformers."


def declared() -> dict[str, dict[str, Any]]:
    """The two tables, `arguments` and `methods`, by name."""
    tables: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())
    return tables


def in_transformers() -> dict[str, list[str]]:
    """The names that the pinned transformers has, those of the sequence-to-sequence classes included."""
    return {
        "arguments": [field.name for field in fields(Seq2SeqTrainingArguments)],
        "methods": sorted(name for name in dir(Seq2SeqTrainer) if not name.startswith("_")),
    }


def file_and_text(test: str) -> tuple[Path, str]:
    """The file of a test reference, "module.text", and the text to be found in it."""
    module, _, text = test.partition(".")
    beside = HERE / f"{module}.py"
    found = [beside] if beside.exists() else list(HERE.parent.rglob(f"{module}.py"))
    assert len(found) == 1, f"{module} names {len(found)} files"
    return found[0], text


def page() -> str:
    """The page, in Markdown."""
    refused = {refusal.argument: refusal for refusal in REFUSALS}
    own = [field for field in fields(NeuronTrainingArguments) if "help" in field.metadata]
    stock = set(in_transformers()["arguments"])
    lines = [
        "# Arguments and methods",
        "",
        "What becomes of every field of `TrainingArguments` and `Seq2SeqTrainingArguments`, and of every public "
        f"method of `Trainer` and `Seq2SeqTrainer`, of transformers {transformers.__version__}. Nothing is ignored: "
        "what can't be honoured raises a ValueError that says why. Written by "
        "`python -m tests.trainer.argument_table`; a test "
        "holds that no name is missing and that every test exists.",
        "",
        "## Arguments of our own",
        "",
        "| argument | default | meaning |",
        "|---|---|---|",
        *(
            f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |"
            for field in own
            if field.name not in stock
        ),
        "",
        "## Arguments of transformers",
        "",
        "| argument | honoured | shown by |",
        "|---|---|---|",
    ]
    tables = declared()
    for name, entry in tables["arguments"].items():
        note = entry.get("note", "")
        if name in refused:
            note = f"Refused {refused[name].where}: {refused[name].reason} {note}".strip()
        lines.append(f"| `{name}` | {note or SAME} | `{entry['test']}` |")
    lines += ["", "## Methods", "", "| method | honoured | shown by |", "|---|---|---|"]
    for name, entry in tables["methods"].items():
        lines.append(f"| `{name}` | {entry.get('note', SAME)} | `{entry['test']}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
