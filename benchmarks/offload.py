"""What optimizer states in the host's memory cost and save: the 60M model with and without, in one alternating run.

    python -m benchmarks.offload

Prints, for one core, TP2, and DP2 with ZeRO-1, the time of a step with the states in the host over that without (the
median over neighbouring turns, and its quartiles), and the peak memory of the fullest core. Both are measured, on the
simulated device: there a copy between the core and the host takes the time of the thread that asks for it, and the
host's AdamW runs on the same cores as the device's, so that the ratio says nothing about Trainium's DMA engines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import Ratio, alternate
from benchmarks.step_time import LARGE, ours

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one core": (1, {}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "DP2, ZeRO-1": (2, {}),
}


def main() -> None:
    """Print one row of a table for each layout."""
    print("| layout | step time, offloaded / not | peak MiB, not | peak MiB, offloaded |\n|---|---|---|---|")
    for name, (ranks, degrees) in LAYOUTS.items():
        said = alternate(
            {
                "held": ours(LARGE, ranks, **degrees),
                "offloaded": ours(LARGE, ranks, optimizer_offload=True, **degrees),
            },
            5,
        )
        times = {side: [answer["seconds"] for answer in answers] for side, answers in said.items()}
        peaks = {side: max(answer["peak"] for answer in answers) / 2**20 for side, answers in said.items()}
        ratio = Ratio.of(times["offloaded"], times["held"])
        print(
            f"| {name} | {ratio.median:.2f} ({ratio.lower:.2f}-{ratio.upper:.2f}) | {peaks['held']:.0f} "
            f"| {peaks['offloaded']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
