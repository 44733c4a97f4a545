"""The demonstration of `make demo`: a model fine-tuned on two simulated NeuronCores, beside the same run on one.

Runs examples/finetune_clm.py tensor-parallel under torchrun, the same fine-tuning in one process, and one step of it on
fake tensors, which predicts what it needs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optimum_trn import ParallelConfig
from optimum_trn.planning import StepTrace, trace_training_step

EXAMPLES = Path(__file__).resolve().parent
OUTPUT = Path("outputs", "demo")
NUM_CORES = 2
BATCH_SIZE, BLOCK_SIZE, STEPS = 8, 128, 40
console = Console()


def run(title: str, command: list[str]) -> None:
    """Run a command with its own progress on the terminal; end this process if it fails."""
    console.rule(title)
    console.print("$ " + " ".join([Path(command[0]).name, *command[1:]]), style="dim", highlight=False)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    code = subprocess.run(command, env=environment).returncode
    if code:
        sys.exit(f"demo: `{' '.join(command)}` ended with code {code}; what it printed above says why.")


def finetune(directory: Path, num_cores: int, *options: str) -> dict[str, Any]:
    """Run the example on that many simulated cores; returns its summary."""
    script = str(EXAMPLES / "finetune_clm.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_cores)]
    run(
        f"Tensor parallel {num_cores}" if num_cores > 1 else "One process",
        [
            *(launcher if num_cores > 1 else [sys.executable]),
            script,
            *("--tensor_parallel_size", str(num_cores), "--output_dir", str(directory)),
            *("--per_device_train_batch_size", str(BATCH_SIZE), "--block_size", str(BLOCK_SIZE)),
            *("--max_steps", str(STEPS), *options),
        ],
    )
    return json.loads((directory / "summary.json").read_text())


def predict(model: Path) -> StepTrace:
    """What planning says about one step of this run, without a tensor of it."""
    return trace_training_step(
        AutoConfig.from_pretrained(model),
        ParallelConfig(tensor_parallel_size=NUM_CORES),
        batch_size=BATCH_SIZE,
        sequence_length=BLOCK_SIZE,
    )


def continue_text(directory: Path, prompt: str) -> str:
    """What stock transformers, on the CPU, makes of the saved directory."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(0)
    return tokenizer.decode(model.generate(tokens, max_new_tokens=24, do_sample=True, top_k=20, pad_token_id=0)[0])


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def main() -> None:
    started = time.perf_counter()
    sharded = finetune(OUTPUT / "tensor_parallel", NUM_CORES)
    single = finetune(OUTPUT / "one_process", 1, "--model", sharded["model"])
    console.rule("Result")
    predicted = predict(Path(sharded["model"]))

    losses = Table("step", f"tensor parallel {NUM_CORES}", "one process", "relative difference", title="Losses")
    differences = []
    for step, (ours, alone) in enumerate(zip(sharded["losses"], single["losses"], strict=True), start=1):
        differences.append(abs(ours - alone) / alone)
        if step == 1 or step % 5 == 0:
            losses.add_row(str(step), f"{ours:.6f}", f"{alone:.6f}", f"{differences[-1]:.1e}")
    console.print(losses)

    memory = Table("simulated NeuronCore", "peak HBM", "peak the trace predicts", "FLOPs of a step the trace predicts")
    memory.title = "One training step, simulated"
    for core, peak in enumerate(sharded["peak_hbm_bytes"]):
        memory.add_row(
            str(core), megabytes(peak), megabytes(predicted.peak_hbm_bytes), f"{predicted.flops / 1e9:.2f} G"
        )
    console.print(memory)
    if single["peak_hbm_bytes"]:
        console.print(f"One core that holds the whole model peaks at {megabytes(single['peak_hbm_bytes'][0])}.")

    text = continue_text(OUTPUT / "tensor_parallel", "The following statement")
    console.print(f"Saved in {OUTPUT / 'tensor_parallel'}; stock transformers loads it and continues:", highlight=False)
    console.print(f"  {text!r}", markup=False, highlight=False)
    console.print(
        f"Time: {time.perf_counter() - started:.0f} s in all; fine-tuning took {sharded['train_seconds']:.0f} s on "
        f"{NUM_CORES} simulated cores and {single['train_seconds']:.0f} s on one. These are times of this machine's "
        f"CPU, not of a NeuronCore.",
        highlight=False,
    )
    if max(differences) > 1e-3:
        sys.exit(f"demo: the losses differ by up to {max(differences):.1e} relative, which is more than rounding.")


if __name__ == "__main__":
    main()
