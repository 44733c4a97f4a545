"""What the recorder costs: a training step of a 60M Llama with it and without it, in one process, alternating.

    python benchmarks/recorder.py            # the 60M model
    python benchmarks/recorder.py --models 1M --steps 200

Every pair of steps runs in both orders by turns; the median of the ratios within pairs is reported, and the spread of
the same measurement with the recorder off in both, which is what the machine's noise alone gives.
"""

import argparse
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import optimum_trn  # noqa: F401  (installs the device)
from benchmarks.device_overhead import MODELS, seconds, training_step
from optimum_trn.device.build import load_extension

WARM_UP = 3


def ratios(step, steps: int, first: bool, second: bool) -> list[float]:
    """Of a step with recording `second` to one with recording `first`, in alternating order."""
    extension, found = load_extension(), []
    for number in range(steps + WARM_UP):
        order = (first, second) if number % 2 else (second, first)
        times = []
        for on in order:
            extension.set_recording(on)
            times.append(seconds(step)[0])
        extension.set_recording(True)
        if number >= WARM_UP:
            one, other = times if number % 2 else reversed(times)
            found.append(other / one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["60M"])
    parser.add_argument("--steps", type=int, default=15, help="pairs to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        torch.manual_seed(0)
        step = training_step(LlamaForCausalLM(LlamaConfig(**MODELS[name])), "neuron")
        with_it, noise = ratios(step, args.steps, False, True), ratios(step, args.steps, False, False)
        low, high = statistics.quantiles(noise, n=4)[::2]
        cost, zero = statistics.median(with_it), statistics.median(noise)
        print(
            f"{name}: the recorder adds {100 * (cost - 1):+.2f} % to a step (median of {args.steps} pairs); "
            f"the same without it in both: {100 * (zero - 1):+.2f} %, quartiles {100 * (low - 1):+.2f} to "
            f"{100 * (high - 1):+.2f} %"
        )


if __name__ == "__main__":
    main()
