"""Host memory of a sharded load: how much of the model one rank ever holds, by kind of page.

    python benchmarks/load_memory.py                # a 500 MB Llama at tensor parallel 2 on simulated NeuronCores

A thread samples RssAnon + RssShmem of each rank (the simulated HBM is shared memory) every millisecond; the figure is
the peak above what the process held after its imports, over the bytes of the model's weights. Mapped pages of the
checkpoint are the kernel's cache and not counted. The bar is 0.60 at tensor parallel 2: half of the weights, and room
for the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BAR = 0.60
SAMPLE_SECONDS = 0.001
# 125 million parameters in float32.
SIZES = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=11,
    num_attention_heads=12,
    num_key_value_heads=12,
    vocab_size=32000,
    tie_word_embeddings=False,
)


def resident_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class PeakSampler(threading.Thread):
    """Keeps the highest `resident_bytes` between start and stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = resident_bytes()
        self.samples = 0
        self.running = True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, resident_bytes())
            self.samples += 1
            time.sleep(SAMPLE_SECONDS)

    def stop(self) -> int:
        self.running = False
        self.join()
        return max(self.peak, resident_bytes())


def rank_main(directory: str) -> None:
    """One rank: import, measure the baseline, load, print what it took as JSON."""
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  (part of the baseline)

    from optimum_trn import NeuronModelForCausalLM, ParallelConfig
    from optimum_trn.device import device_type

    baseline = resident_bytes()
    dist.init_process_group("gloo" if device_type() == "cpu" else "neuron")
    sampler = PeakSampler()
    sampler.start()
    start = time.perf_counter()
    model = NeuronModelForCausalLM.from_pretrained(directory, ParallelConfig(dist.get_world_size()))
    seconds = time.perf_counter() - start
    peak = sampler.stop()
    local = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(json.dumps(dict(baseline=baseline, peak=peak, local=local, seconds=seconds, samples=sampler.samples)))
    dist.destroy_process_group()


def launch(directory: str, world_size: int) -> list[dict[str, float]]:
    """Run `rank_main` in `world_size` processes and return what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [sys.executable, __file__, "--rank-of", directory]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    results = []
    for process in ranks:
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank ended with exit code {process.returncode}")
        results.append(json.loads(said.strip().splitlines()[-1]))
    return results


def save_model(directory: str) -> int:
    """Write a stock checkpoint of the benchmark's size, in a process of its own; returns the bytes of its weights."""
    script = (
        "import sys, json, torch; from transformers import LlamaConfig, LlamaForCausalLM\n"
        "LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2]))).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, directory, json.dumps(SIZES)], check=True)
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of)
        return
    with tempfile.TemporaryDirectory() as directory:
        model_bytes = save_model(directory)
        results = launch(directory, arguments.tensor_parallel_size)
    print(f"model: {model_bytes / 1e6:.0f} MB, tensor parallel {arguments.tensor_parallel_size}")
    worst = 0.0
    for rank, result in enumerate(results):
        ratio = (result["peak"] - result["baseline"]) / model_bytes
        worst = max(worst, ratio)
        print(
            f"rank {rank}: peak {(result['peak'] - result['baseline']) / 1e6:.0f} MB above a baseline of "
            f"{result['baseline'] / 1e6:.0f} MB = {ratio:.3f} of the model (its weights: "
            f"{result['local'] / model_bytes:.3f}), {result['seconds']:.1f} s, {result['samples']:.0f} samples"
        )
    print(f"worst: {worst:.3f}, bar: {BAR} at tensor parallel 2")


if __name__ == "__main__":
    main()
