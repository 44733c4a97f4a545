"""Trains one model on real text at several layouts, and draws their losses beside those of one process.

    python examples/loss_curves.py                                  # all of it, into docs/loss_curves.{md,json,svg}
    python examples/loss_curves.py --dtypes float64 --steps 20 --docs outputs

needs no network, but matplotlib (`pip install "optimum_trn[examples]"`): the text is what `help()` of the Python
interpreter knows. Every layout is started with torchrun, one after the other, and sees the same rows in every step. In
float64 a tiny model must have the losses of one process, step by step; in float32 one of 10 million parameters must
arrive at the same place, as one process does that adds up in another order. The exit code says whether they do.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from finetune_clm import pack, reference_texts, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, default_data_collator, set_seed

from optimum_trn import NeuronTrainer, NeuronTrainingArguments
from optimum_trn.patching.verify import KeepFloat64

ONE_PROCESS = "one process"
OTHER_ORDER = "one process, 2 micro-batches"
"""Nothing is parallel, but sums are taken in another order: how far rounding alone leads."""
ROWS, LENGTH = 4, 64
"""Of one optimizer step, at every layout."""

# Processes, and the arguments of each; rows x accumulation x data-parallel ranks is ROWS.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    ONE_PROCESS: (1, dict(per_device_train_batch_size=4)),
    OTHER_ORDER: (1, dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)),
    "TP2 x PP2": (
        4,
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        ),
    ),
    "TP2 x DP2 + ZeRO-1": (4, dict(tensor_parallel_size=2, zero_1=True, per_device_train_batch_size=2)),
    "MiCS 2x2": (4, dict(mics_partition_size=2, per_device_train_batch_size=1)),
    "CP2 x TP2": (4, dict(context_parallel_size=2, tensor_parallel_size=2, per_device_train_batch_size=4)),
}

# float64: 0.2 million parameters, so that rounding is all that could differ; float32: 9.8 million.
SIZES: dict[str, dict[str, int]] = {
    "float64": dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4),
    "float32": dict(vocab_size=1024, hidden_size=320, intermediate_size=864, num_hidden_layers=8),
}
STEP_TOLERANCE = 1e-6
"""Of every loss in float64."""
MEAN_TOLERANCE, LAST = 0.01, 50
"""Of the mean of the last losses in float32, relative."""


def rows_of_text(tokenizer: PreTrainedTokenizerBase, steps: int) -> Dataset:
    """As many rows as the steps take."""
    rows = pack(Dataset.from_dict({"text": reference_texts()}), tokenizer, "text", LENGTH)
    return rows.shuffle(seed=0).select(range(min(len(rows), steps * ROWS)))


def train(layout: str, dtype: str, steps: int, output: Path) -> None:
    """One rank of one layout; rank 0 writes the losses of all steps to `output`."""
    torch.set_default_dtype(getattr(torch, dtype))  # also that of the sum in which Trainer keeps the loss
    tokenizer = train_tokenizer(reference_texts(), SIZES[dtype]["vocab_size"])
    set_seed(0)
    config = LlamaConfig(**SIZES[dtype], num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH)
    arguments = NeuronTrainingArguments(
        output_dir=str(output.parent),
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **LAYOUTS[layout][1],
    )
    trainer = NeuronTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows_of_text(tokenizer, steps),
        data_collator=default_data_collator,
    )
    with KeepFloat64():
        trainer.train()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        parameters = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
        output.write_text(json.dumps({"parameters": parameters, "losses": losses}))
    trainer.end()


def launch(layout: str, dtype: str, steps: int, directory: Path) -> dict[str, Any]:
    """Run one layout with torchrun, and return what its rank 0 wrote."""
    output = directory / "run.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(LAYOUTS[layout][0])),
        *(__file__, "--rank-of", layout, "--dtypes", dtype, "--steps", str(steps), "--output", str(output)),
    ]
    # The simulated core refuses float64 as the hardware does, unless a proof asks for it.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "OPTIMUM_TRN_ALLOW_FLOAT64": "1"}
    log = directory / "run.log"
    with log.open("w") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=file).returncode
    if code:
        sys.exit(f"{layout} in {dtype} ended with exit code {code}; its output ends with\n{log.read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def compare(dtype: str, curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    """How far each layout is from one process, and whether that is within the tolerance."""
    expected = torch.tensor(curves[ONE_PROCESS], dtype=torch.float64)
    rows = []
    for layout, curve in curves.items():
        losses = torch.tensor(curve, dtype=torch.float64)
        worst = float((losses - expected).abs().max())
        last, wanted = float(losses[-LAST:].mean()), float(expected[-LAST:].mean())
        relative = abs(last / wanted - 1)
        right = worst <= STEP_TOLERANCE if dtype == "float64" else relative <= MEAN_TOLERANCE
        rows.append(dict(layout=layout, dtype=dtype, worst=worst, last=last, relative=relative, within=right))
        print(f"{dtype} {layout:27} worst step {worst:.1e}  mean of the last {LAST} {last:.4f} ({relative:.1e} off)")
    return rows


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """For each dtype the losses, and below them how far each layout is from one process."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "loss_curves", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(5 * len(results), 6), squeeze=False, sharex=True)
    for column, (dtype, result) in enumerate(results.items()):
        curves = result["curves"]
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"{dtype}, {result['parameters'] / 1e6:.1f} million parameters")
        resolution = torch.finfo(getattr(torch, dtype)).eps  # where a logarithm has no place for equal losses
        for number, (layout, losses) in enumerate(curves.items()):
            style = dict(color=f"C{number}", linewidth=0.7)
            above.plot(losses, **style)
            if layout != ONE_PROCESS:
                apart = [abs(a - b) for a, b in zip(losses, curves[ONE_PROCESS], strict=True)]
                below.plot([max(value, resolution) for value in apart], label=layout, **style)
        if dtype == "float64":
            below.axhline(STEP_TOLERANCE, color="black", linestyle=":", linewidth=0.8)
        below.set_yscale("log")
        below.set_xlabel("step")
        below.legend(fontsize=7)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("difference from one process")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def page(results: dict[str, dict[str, Any]], comparisons: list[dict[str, Any]], steps: int) -> str:
    """The page of the docs."""
    lines = [
        "# Loss curves",
        "",
        f"{steps} steps of a Llama from random weights on the text that `help()` of the Python interpreter knows,",
        f"{ROWS} rows of {LENGTH} tokens a step, AdamW with clipping, on simulated NeuronCores: every layout beside",
        "one process. Written by `python examples/loss_curves.py`; every loss is in `loss_curves.json`.",
        "",
        "![The losses of all layouts, and how far they are from those of one process](loss_curves.svg)",
        "",
        f"In float64 every step's loss must be within {STEP_TOLERANCE:.0e} of one process; in float32 the mean of the",
        f"last {LAST} within {MEAN_TOLERANCE:.0%}, since rounding grows there while such a model learns:",
        f"*{OTHER_ORDER}* has nothing parallel, but takes its sums in another order.",
        "",
        "| dtype | parameters | layout | worst step | mean of the last | off by | within |",
        "|" + "---|" * 7,
    ]
    for row in comparisons:
        size = f"{results[row['dtype']]['parameters'] / 1e6:.1f} M"
        lines.append(
            f"| {row['dtype']} | {size} | {row['layout']} | {row['worst']:.1e} | {row['last']:.4f} | "
            f"{row['relative']:.1e} | {'yes' if row['within'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtypes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parent.parent / "docs")
    parser.add_argument("--rank-of", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return train(options.rank_of, options.dtypes[0], options.steps, options.output)

    work = Path("outputs", "loss_curves")
    work.mkdir(parents=True, exist_ok=True)
    options.docs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    comparisons = []
    for dtype in options.dtypes:
        runs = {
            layout: launch(layout, dtype, options.steps, work)
            for layout in LAYOUTS
            if layout in (ONE_PROCESS, *options.layouts)
        }
        curves = {layout: run["losses"] for layout, run in runs.items()}
        results[dtype] = {"parameters": runs[ONE_PROCESS]["parameters"], "curves": curves}
        comparisons += compare(dtype, curves)
        (options.docs / "loss_curves.json").write_text(json.dumps(results) + "\n")
        draw(results, options.docs / "loss_curves.svg")
        (options.docs / "loss_curves.md").write_text(page(results, comparisons, options.steps))
    if not all(row["within"] for row in comparisons):
        sys.exit("A layout is not within its tolerance.")


if __name__ == "__main__":
    main()
