"""Saving and loading a training checkpoint: seconds, added host memory, and how long training stands still.

    python benchmarks/checkpoint.py                 # a 500 MB Llama with AdamW; writes docs/checkpoint.md

Compared are one process with transformers' Trainer, two tensor-parallel ranks of NeuronTrainer, with and without
`async_save`, and two ranks with transformers' own tensor parallelism (which saves its weights only: it can't resume).
All run on simulated NeuronCores of this machine, one after the other, each save and load twice: of seconds the better
counts, of memory the worse. Memory is the peak of RssAnon + RssShmem, sampled every millisecond, above what the rank
held before it began, over the bytes of the model's weights. The bars: 0.3 for a blocking save, and 10 % of its time for
which training stands still for an asynchronous one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load_memory import PeakSampler, resident_bytes, save_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checkpoint.md"
CASES = {
    "Trainer, one process": ("stock", 1),
    "NeuronTrainer, TP2": ("blocking", 2),
    "NeuronTrainer, TP2, async_save": ("async", 2),
    "transformers' tensor parallelism, TP2 (weights only)": ("native", 2),
}
MEMORY_BAR, STALL_BAR = 0.3, 0.1


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and bytes above those before, of two runs: the fewer seconds, the more bytes."""
    results = []
    for _ in range(2):
        before, sampler = resident_bytes(), PeakSampler()
        sampler.start()
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
        results.append((seconds, float(sampler.stop() - before)))
    return min(seconds for seconds, _ in results), max(memory for _, memory in results)


def rank_main(case: str, directory: str, output: str) -> None:
    """One rank: train two steps, save and load twice, print what it took as JSON."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from optimum_trn import NeuronModelForCausalLM, NeuronTrainer, NeuronTrainingArguments, ParallelConfig

    options: dict[str, Any] = dict(
        output_dir=output,
        max_steps=2,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    if case in ("blocking", "async"):
        options |= dict(tensor_parallel_size=2, async_save=case == "async")
        model = NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(2))
        trainer: Trainer = NeuronTrainer(model=model, args=NeuronTrainingArguments(**options), train_dataset=rows)
    else:
        arguments = TrainingArguments(**options)
        kwargs = dict(tp_plan="auto") if case == "native" else {}
        model = AutoModelForCausalLM.from_pretrained(directory, **kwargs)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    result: dict[str, float] = {}
    if case == "native":
        result["save"], result["save_memory"] = measured(lambda: model.save_pretrained(f"{output}/native"))
    else:
        checkpoint = f"{output}/checkpoint-{trainer.state.global_step}"

        def save() -> None:
            trainer._save_checkpoint(model, None)
            result.setdefault("stall", 1e9)
            result["stall"] = min(result["stall"], time.perf_counter() - began[0])
            if case == "async":
                trainer.finish_saving()
            began[0] = time.perf_counter()

        began = [time.perf_counter()]
        result["save"], result["save_memory"] = measured(save)

        def load() -> None:
            trainer._load_from_checkpoint(checkpoint)
            trainer._load_optimizer_and_scheduler(checkpoint)

        result["load"], result["load_memory"] = measured(load)
        result["checkpoint_bytes"] = sum(path.stat().st_size for path in Path(checkpoint).rglob("*") if path.is_file())
    print(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(case: str, world_size: int, directory: str, output: str) -> list[dict[str, float]]:
    """Run `rank_main` in that many processes and return what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if world_size > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        command = [sys.executable, __file__, "--rank-of", case, directory, output]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    results = []
    for process in ranks:
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{case}: a rank ended with exit code {process.returncode}")
        results.append(json.loads(said.strip().splitlines()[-1]))
    return results


def page(results: dict[str, list[dict[str, float]]], model_bytes: int) -> str:
    """The table, of the slowest rank and the one with the most memory."""

    def worst(ranks: list[dict[str, float]], key: str) -> float | None:
        return max((rank[key] for rank in ranks if key in rank), default=None)

    lines = [
        "# Saving and loading a checkpoint",
        "",
        f"A Llama of {model_bytes / 1e6:.0f} MB in float32 with AdamW (three times that in a checkpoint), on simulated",
        "NeuronCores of one machine with two CPU cores; seconds of wall clock of the slowest rank, and host memory",
        "that the rank with the most of it adds while it saves or loads, over the bytes of the weights. Written by",
        "`python benchmarks/checkpoint.py`, whose docstring says how.",
        "",
        "| | save, s | training stands still, s | memory to save | load, s | memory to load |",
        "|---|---|---|---|---|---|",
    ]
    for name, ranks in results.items():
        cells = []
        for key in ("save", "stall", "save_memory", "load", "load_memory"):
            value = worst(ranks, key)
            value = value / model_bytes if value is not None and key.endswith("memory") else value
            cells.append("" if value is None else f"{value:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    blocking, beside = results["NeuronTrainer, TP2"], results["NeuronTrainer, TP2, async_save"]
    stall = (worst(beside, "stall") or 0) / (worst(blocking, "save") or 1)
    memory = (worst(blocking, "save_memory") or 0) / model_bytes
    lines += [
        "",
        f"A blocking save adds {memory:.2f} of the model (bar: {MEMORY_BAR}). For an asynchronous one training stands "
        f"still for {stall:.0%} of that time (bar: {STALL_BAR:.0%}),",
        "once the memory for the copy, which is that rank's share of the checkpoint, has been taken by the first save.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(*arguments.rank_of)
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        model_bytes = save_model(f"{directory}/model")
        for name, (case, world_size) in CASES.items():
            results[name] = launch(case, world_size, f"{directory}/model", f"{directory}/{case}")
            print(name, json.dumps(results[name]))
    PAGE.write_text(page(results, model_bytes))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
