"""How much of transformers is sharded, and proven: every configuration of its auto mappings at tensor parallel 2.

    python benchmarks/coverage.py                                   # all of it, into docs/coverage.json and coverage.md
    python benchmarks/coverage.py --kind causal --types llama,mpt   # some of it, printed
    python benchmarks/coverage.py --failed                          # again what is not proven in the table

Builds a tiny random model for every configuration, patches it as a user would (by its declaration, or by a plan that is
inferred), and compares one training step on two real processes with one process: loss, every gradient, gradient norm,
and how many bytes of the attention and feed-forward weights each rank holds.  Models are forked from a parent that has
imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OPTIMUM_TRN_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from benchmarks.coverage_case import SECONDS, root, run_case
from tests.models.zoo import KINDS, model_types, zoo_class

BARS = {"causal": 168, "masked": 44, "seq2seq": 35, "image": 24, "sequence": 110, "audio": 11, "image_text": 50}
"""Configurations that must be fully proven, by kind."""

SAMPLE = (
    "causal llama, causal mpt, causal deepseek_v2, causal gpt_bigcode, causal exaone4, causal xglm, causal olmo3, "
    "causal granitemoe, causal phimoe, causal mamba, masked bert, masked mpnet, masked roformer, seq2seq pegasus, "
    "seq2seq longt5, image deit, image vit_msn, sequence nemotron, question splinter, audio hubert"
)
"""What `make test` runs."""


def run(pairs: list[tuple[str, str]], lanes: int, show: Any) -> None:
    """Runs cases in forked processes, `lanes` at a time; `show` gets the row of each."""
    waiting, live = list(pairs), {}
    while waiting or live:
        while waiting and len(live) < lanes:
            kind, model_type = waiting.pop(0)
            try:
                zoo_class(model_type, kind)  # imported before the fork, once for all
            except Exception:
                pass
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                os.setpgid(0, 0)
                signal.alarm(SECONDS)
                if "-v" not in sys.argv:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                try:
                    row = run_case(kind, model_type)
                except BaseException as error:
                    row = {
                        "kind": kind,
                        "type": model_type,
                        "status": "failed",
                        "reason": f"{type(error).__name__}: {error}"[:400],
                    }
                with os.fdopen(writer, "w") as pipe:
                    json.dump(row, pipe, default=str)
                os._exit(0)
            os.close(writer)
            live[reader] = (child, kind, model_type, time.monotonic(), b"")
        for reader in select.select(list(live), [], [])[0]:
            child, kind, model_type, start, read = live.pop(reader)
            more = os.read(reader, 1 << 16)
            if more:
                live[reader] = (child, kind, model_type, start, read + more)
                continue
            os.close(reader)
            os.waitpid(child, 0)
            try:
                os.killpg(child, signal.SIGKILL)  # its other rank, if it hangs
            except ProcessLookupError:
                pass
            row = (
                json.loads(read)
                if read
                else {
                    "kind": kind,
                    "type": model_type,
                    "status": "failed",
                    "reason": f"ended, or not done within {SECONDS} s",
                }
            )
            show({**row, "seconds": round(time.monotonic() - start, 1)})


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    numbers = ""
    if "loss" in row:
        numbers = (
            f"loss {row['loss']:.0e} gradients {row['gradients']:.0e} norm {row['norm']:.0e} local {row['local']:.2f}"
        )
        if row["status"] == "WRONG":
            numbers += f" worst {row['worst']}"
    whole = [name for part in ("attention", "mlp") if row.get(part) for name in row[part]["whole"]]
    more = [*(f"{path}: {why}" for path, why in row.get("unproven", {}).items()), *whole[:3], row.get("reason", "")]
    return (
        f"{row['kind']:9}{row['type']:26}{row['status']:36}{numbers} {row['seconds']} s  "
        + " | ".join(filter(None, more))[:300]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The page of the docs."""
    lines = [
        "# Coverage",
        "",
        f"Every configuration of the auto mappings of transformers {transformers.__version__}, tiny and with random",
        "weights, at tensor parallel 2 on two processes against one: loss, every gradient and the gradient norm, in",
        "float64 where the model computes in it. *Fully proven*: all of them are equal, and every attention and every",
        "feed-forward part is sharded. *Native*: the plan that transformers itself has for the class shards attention",
        "and feed-forward parts, judged by its patterns on the same modules: an upper bound, since it is not run.",
        "Written by `python benchmarks/coverage.py`; all numbers are in `coverage.json`.",
        "",
        "| mapping | all | fully proven | bar | part replicated | no attention | refused | not run | wrong | native |",
        "|" + "---|" * 10,
    ]
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        counts = Counter(_class(row["status"]) for row in own)
        native = sum(row.get("native") == "attention and mlp" for row in own)
        cells = [
            len(own),
            counts["full"],
            BARS.get(kind, ""),
            counts["part"],
            counts["none"],
            counts["refused"],
            counts["not run"],
            counts["wrong"],
            native,
        ]
        lines.append(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
    for kind in KINDS:
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["type"])
        if not own:
            continue
        lines += [
            "",
            f"## {kind}",
            "",
            "| model type | result | plan | attention, MLP bytes on a rank | native | reason |",
            "|---|---|---|---|---|---|",
        ]
        for row in own:
            shares = ", ".join(
                f"{part['local_bytes'] / part['total_bytes']:.2f}" if (part := row.get(name)) else "-"
                for name in ("attention", "mlp")
            )
            plan = {True: "declared", False: "inferred", None: ""}[row.get("declared")]
            why = row.get("reason") or "; ".join(f"{path}: {text}" for path, text in row.get("unproven", {}).items())
            why = why.replace("|", "/").replace("\n", " ")[:160]
            lines.append(f"| `{row['type']}` | {row['status']} | {plan} | {shares} | {row.get('native', '')} | {why} |")
    return "\n".join(lines) + "\n"


def _class(status: str) -> str:
    if status == "proven":
        return "full"
    if status in ("proven, no attention", "proven, no MLP"):
        return "none"
    if status.startswith("proven"):
        return "part"
    return {"WRONG": "wrong", "refused": "refused"}.get(status, "not run")


def main() -> int:
    """Runs what is asked for; 1 if anything is wrong, or a bar is not reached in a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--types", help="model types, with commas between them")
    parser.add_argument("--failed", action="store_true", help="only what is not fully proven in the table")
    parser.add_argument("--resume", action="store_true", help="only what the table does not have")
    parser.add_argument("--sample", action="store_true", help="the configurations that make test runs; writes nothing")
    parser.add_argument("--lanes", type=int, default=2, help="models at a time")
    parser.add_argument("--json", type=Path, default=root() / "docs" / "coverage.json")
    parser.add_argument("-v", action="store_true", help="show what the models' processes say")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

    kinds = arguments.kind.split(",") if arguments.kind else list(KINDS)
    pairs = [(kind, model_type) for kind in kinds for model_type in model_types(kind)]
    old = {}
    if arguments.json.exists() and not arguments.sample:
        old = {(row["kind"], row["type"]): row for row in json.loads(arguments.json.read_text())["rows"]}
    if arguments.sample:
        pairs = [tuple(pair.split()) for pair in SAMPLE.split(", ")]  # type: ignore[misc]
    if arguments.types:
        pairs = [pair for pair in pairs if pair[1] in arguments.types.split(",")]
    if arguments.failed:
        pairs = [pair for pair in pairs if old.get(pair, {}).get("status") != "proven"]
    if arguments.resume:
        pairs = [pair for pair in pairs if pair not in old]

    start, rows = time.monotonic(), dict(old)
    fresh: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        fresh.append(row)
        rows[row["kind"], row["type"]] = row
        if arguments.sample or arguments.types or row["status"] != "proven":
            print(line(row), flush=True)
        if not arguments.sample and len(fresh) % 50 == 0:
            save(arguments.json, rows)

    run(pairs, arguments.lanes, show)
    if not arguments.sample:
        save(arguments.json, rows)
    for kind in KINDS:
        own = [row for row in rows.values() if row["kind"] == kind]
        full = sum(row["status"] == "proven" for row in own)
        if own and not (arguments.sample or arguments.types):
            print(f"{kind}: {full} of {len(own)} fully proven" + (f", bar {BARS[kind]}" if kind in BARS else ""))
    print(f"{len(fresh)} configurations in {time.monotonic() - start:.0f} s")
    wrong = [row for row in fresh if row["status"] in ("WRONG", "failed")]
    everything = len(pairs) == sum(len(model_types(kind)) for kind in KINDS)
    missed = [
        kind
        for kind, bar in BARS.items()
        if everything and sum(row["kind"] == kind and row["status"] == "proven" for row in rows.values()) < bar
    ]
    return 1 if any(row["status"] == "WRONG" for row in wrong) or missed else 0


def save(path: Path, rows: dict[Any, dict[str, Any]]) -> None:
    """Writes the table and its page."""
    order = {kind: index for index, kind in enumerate(KINDS)}
    ordered = sorted(rows.values(), key=lambda row: (order[row["kind"]], row["type"]))
    path.write_text(json.dumps({"transformers": transformers.__version__, "rows": ordered}, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(ordered))


if __name__ == "__main__":
    sys.exit(main())
