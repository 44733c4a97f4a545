"""Peak HBM of a training step on each simulated core, by layout, beside what theory says.

    python benchmarks/memory.py                     # two minutes; writes docs/memory.{md,json}
    python benchmarks/memory.py --layouts TP2 PP2 --docs outputs

A Llama of 4 layers with a vocabulary of 32,000, float32, eager attention (which keeps its scores, so that recomputing
them has an effect), AdamW, as many tokens on every data-parallel rank. Measured is the device's own count, from the
start of the third step to the end of its optimizer; the closed form is in memory_model.py. Each layout is started
with torchrun, one after the other. The exit code says whether the order and the closed form hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory_model import SIZES, Layout, Sizes, closed_form

TOLERANCE = 0.10
"""Of the measured peak from the closed form."""
NATIVE_BAR = 0.90
"""TP2 + SP at most this part of transformers' native TP2."""
NATIVE = "native TP2"

LAYOUTS = {
    "one core": Layout(),
    "TP2": Layout(tensor=2),
    "TP2 + SP": Layout(tensor=2, sequence=True),
    "TP2 + SP + ZeRO-1 x DP2": Layout(tensor=2, sequence=True, data=2),
    "TP2 + selective": Layout(tensor=2, selective=True),
    "PP2": Layout(stages=2),
    "MiCS 2": Layout(data=2, partition=2),
}
BELOW = [
    ("TP2", "one core"),
    ("TP2 + SP", "TP2"),
    ("TP2 + SP + ZeRO-1 x DP2", "TP2 + SP"),
    ("TP2 + selective", "TP2"),
    ("PP2", "one core"),
    ("MiCS 2", "one core"),
]
"""Where theory says that the first takes less than the second."""


def measure(name: str, sizes: Sizes, output: str) -> None:
    """One rank of one layout: three steps, and the peak of the third."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, default_data_collator

    from optimum_trn import NeuronTrainer, NeuronTrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.length,
        attn_implementation="eager",
    )
    tokens = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.length))
    found: dict[str, Any] = {"peaks": {}}

    class Watch(TrainerCallback):
        """Resets the peak before a step, and notes it before and after the optimizer."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.accelerator.reset_peak_memory_stats()
            found["start"] = torch.accelerator.memory_allocated()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["peaks"]["forward and backward"] = torch.accelerator.max_memory_allocated()
            torch.accelerator.reset_peak_memory_stats()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["peaks"]["optimizer"] = torch.accelerator.max_memory_allocated()

    if name == NATIVE:
        # It shards what it loads only. Rank 0 writes a model for both ranks, which torchrun has started together.
        directory = f"{output}.model"
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        if dist.get_rank() == 0:
            LlamaForCausalLM(config).save_pretrained(directory)
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(directory, tp_plan="auto", attn_implementation="eager").train()
        batch = dict.fromkeys(("input_ids", "labels"), tokens.to(torch.accelerator.current_accelerator()))
        # The fused step takes either of them, not both.
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)]
        optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], fused=True)
        watch = Watch()
        for _ in range(3):
            watch.on_step_begin(None, None, None)
            model(**batch).loss.backward()
            watch.on_pre_optimizer_step(None, None, None)
            optimizer.step()
            watch.on_optimizer_step(None, None, None)
            optimizer.zero_grad()
    else:
        layout = LAYOUTS[name]
        arguments = NeuronTrainingArguments(
            output_dir=tempfile.gettempdir(),
            max_steps=3,
            per_device_train_batch_size=sizes.rows // layout.stages,
            gradient_accumulation_steps=layout.stages,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **layout.arguments,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens] * 3 * layout.data
        trainer = NeuronTrainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[Watch()],
        )
        trainer.train()
    every = [found]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(every, found)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(output).write_text(json.dumps(every))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(name: str, sizes: str, directory: Path) -> list[dict[str, Any]]:
    """Run one layout with torchrun; what every rank found."""
    world_size = 2 if name == NATIVE else LAYOUTS[name].world_size
    output = directory / "found.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)),
        *(__file__, "--rank-of", name, "--sizes", sizes, "--output", str(output)),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        sys.exit(f"{name} ended with exit code {run.returncode}; its output ends with\n{run.stdout[-3000:]}")
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


def row_of(name: str, sizes: str, directory: Path) -> dict[str, Any]:
    """Measured and computed bytes of every core; native tensor parallelism has no closed form here."""
    found = launch(name, sizes, directory)
    measured = [max(rank["peaks"].values()) for rank in found]
    row: dict[str, Any] = {"layout": name, "measured": measured, "found": found}
    if name != NATIVE:
        peaks = closed_form(SIZES[sizes], LAYOUTS[name])
        peaks = peaks if len(peaks) == len(measured) else peaks * len(measured)
        row |= {"computed": [peak.total for peak in peaks], "parts": [asdict(peak) for peak in peaks]}
        row["off"] = [value / peak.total - 1 for value, peak in zip(measured, peaks, strict=True)]
    print(
        f"{name:25} measured "
        + " ".join(f"{value / 1e6:6.1f}" for value in measured)
        + " MB   closed form "
        + " ".join(f"{value / 1e6:6.1f}" for value in row.get("computed", [])),
        flush=True,
    )
    return row


def failures(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Which of the claims do not hold."""
    peaks = {name: max(row["measured"]) for name, row in rows.items()}
    wrong = [
        f"{name} takes {peaks[name]:,} bytes, not less than {other} with {peaks[other]:,}"
        for name, other in BELOW
        if {name, other} <= set(peaks) and peaks[name] >= peaks[other]
    ]
    wrong += [
        f"{name} is more than {TOLERANCE:.0%} from its closed form"
        for name, row in rows.items()
        if max(map(abs, row.get("off", [0.0]))) > TOLERANCE
    ]
    ours = "TP2 + SP"
    if {ours, NATIVE} <= set(peaks) and peaks[ours] > NATIVE_BAR * peaks[NATIVE]:
        wrong.append(f"{ours} takes {peaks[ours]:,} bytes, more than {NATIVE_BAR} of {NATIVE} with {peaks[NATIVE]:,}")
    return wrong


def page(rows: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    """The page of the docs."""
    below = dict(BELOW)
    lines = [
        "# Memory of a training step",
        "",
        f"Peak HBM of each simulated core in one optimizer step of a Llama of {sizes.layers} layers: hidden size",
        f"{sizes.hidden}, feed-forward size {sizes.feed_forward}, {sizes.heads} heads, a vocabulary of",
        f"{sizes.vocabulary:,}, float32, eager attention, AdamW, {sizes.rows} rows of {sizes.length} tokens on every",
        "data-parallel rank (in the pipeline one row a micro-batch). *Measured* is what the simulated device counts;",
        "the *closed form* is computed from sizes and degrees alone: its terms and their sources are in",
        "`benchmarks/memory_model.py`. Written by `python benchmarks/memory.py`; all numbers are in `memory.json`. MB",
        "are 10^6 bytes; where the cores of a layout differ, as the stages of a pipeline do, all are given.",
        "",
        "| layout | measured on simulated cores, MB | closed form, MB | off by | must be below |",
        "|" + "---|" * 5,
    ]
    for name, row in rows.items():
        cells = [
            list(dict.fromkeys(f"{value / 1e6:.1f}" for value in row["measured"])),
            list(dict.fromkeys(f"{value / 1e6:.1f}" for value in row.get("computed", []))),
            list(dict.fromkeys(f"{value:+.1%}" for value in row.get("off", []))),
        ]
        lines.append(f"| {name} | " + " | ".join(", ".join(cell) for cell in cells) + f" | {below.get(name, '')} |")
    lines += [
        "",
        "Closed form by what the bytes are for, at the fullest moment of the step, in MB:",
        "",
        "| layout | parameters | moments | gradients | activations | loss |",
        "|" + "---|" * 6,
    ]
    for name, row in rows.items():
        for parts in {json.dumps(parts): parts for parts in row.get("parts", [])}.values():
            lines.append(f"| {name} | " + " | ".join(f"{value / 1e6:.1f}" for value in parts.values()) + " |")
    if {"TP2 + SP", NATIVE} <= set(rows):
        ratio = max(rows["TP2 + SP"]["measured"]) / max(rows[NATIVE]["measured"])
        lines += [
            "",
            f'`{NATIVE}` is the tensor parallelism of transformers itself (`tp_plan="auto"`) on the same device;',
            f"TP2 + SP takes {ratio:.2f} of it. It gathers the logits, so that the loss works on the whole vocabulary.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, NATIVE], default=[*LAYOUTS, NATIVE])
    parser.add_argument("--sizes", choices=SIZES, default="32k")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parent.parent / "docs")
    parser.add_argument("--rank-of", choices=[*LAYOUTS, NATIVE], help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return measure(options.rank_of, SIZES[options.sizes], options.output)

    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.layouts:
            rows[name] = row_of(name, options.sizes, Path(directory))
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.docs / "memory.md").write_text(page(rows, SIZES[options.sizes]))
    wrong = failures(rows)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
