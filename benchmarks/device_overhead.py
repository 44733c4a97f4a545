"""A training step of a Llama on `neuron:0` against `cpu`: same process, one thread, alternating.

    python benchmarks/device_overhead.py            # both models, CPU memory kept by malloc (the fair comparison)
    python benchmarks/device_overhead.py --default-malloc

By default malloc is told to keep what it gets: with its own thresholds it returns large blocks to the system on every
free and pays page faults for them again, which a device arena never does, so the device would win by that alone.
"""

import argparse
import copy
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import optimum_trn  # noqa: F401  (installs the device)

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>

MODELS = {
    "60M": dict(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "1M": dict(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
    ),
}
BATCH, LENGTH = 4, 256


def training_step(model: LlamaForCausalLM, device: str) -> Callable[[], float]:
    """One AdamW step as a function of nothing; returns the loss."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=generator).to(device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def seconds(step: Callable[[], float]) -> tuple[float, float]:
    started = time.perf_counter()
    loss = step()
    return time.perf_counter() - started, loss


def compare(name: str, steps: int) -> float:
    """Median over alternating pairs of the step time on `neuron` divided by that on `cpu`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODELS[name]))
    on_cpu, on_neuron = training_step(model, "cpu"), training_step(model, "neuron")
    ratios, cpu_times, neuron_times = [], [], []
    for number in range(steps + 3):
        first, second = (on_cpu, on_neuron) if number % 2 else (on_neuron, on_cpu)
        results = {first: seconds(first), second: seconds(second)}
        (cpu, cpu_loss), (neuron, neuron_loss) = results[on_cpu], results[on_neuron]
        if cpu_loss != neuron_loss:
            raise RuntimeError(f"Step {number}: loss {neuron_loss} on neuron, {cpu_loss} on cpu.")
        if number >= 3:  # warm-up
            ratios.append(neuron / cpu)
            cpu_times.append(cpu)
            neuron_times.append(neuron)
    ratio = statistics.median(ratios)
    print(
        f"{name:>4}: {1e3 * statistics.median(cpu_times):9.2f} ms on cpu, "
        f"{1e3 * statistics.median(neuron_times):9.2f} ms on neuron, "
        f"ratio {ratio:.3f} (of the fastest steps {min(neuron_times) / min(cpu_times):.3f}), losses bit-equal"
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--default-malloc", action="store_true", help="leave malloc as it is")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=0, help="pairs to measure (default: 15 for 60M, 150 for 1M)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.default_malloc:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    print("malloc:", "defaults" if args.default_malloc else "mmap and trim thresholds raised")
    for name in args.models:
        compare(name, args.steps or {"60M": 15, "1M": 150}[name])


if __name__ == "__main__":
    main()
