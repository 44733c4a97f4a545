"""Writes the tables of step time into docs/performance.md, and the plot of growth, from docs/performance.json alone.

python -m benchmarks.performance_page
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import PARALLEL, ROOT
from benchmarks.step_time import LINES, RESULTS, replace_section

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.svg"


def tables(results: dict[str, dict[str, Any]]) -> str:
    """The ratios of all lines that were measured, and the seconds behind them."""
    lines = [
        "| Line | Ratio | Median | Quartiles | Has to be | | Commit | 2 threads |",
        "|" + "---|" * 8,
    ]
    seconds = ["| Line | Contender | ms a step, median; or peak bytes of a core |", "|" + "---|" * 3]
    for name in LINES:
        if name not in results:
            lines.append(f"| {name} | | | | | not measured | | |")
            continue
        result = results[name]
        speeds = ", ".join(f"{speed:.2f}" for speed in result["parallel"])
        for what, ratio in result["ratios"].items():
            verdict = ("met" if ratio["met"] else "MISSED") + (" (VOID)" if result["void"] else "")
            lines.append(
                f"| {name} | {what} | {ratio['median']:.3f} | {ratio['lower']:.3f}-{ratio['upper']:.3f} "
                f"| {ratio['bound']} | {verdict} | {result['commit']} | {speeds} |"
            )
        seconds += [f"| {name} | {who} | {1e3 * value:.1f} |" for who, value in result["seconds"].items()]
        seconds += [
            f"| {name} | {who} | {value / 1e6:.1f} MB |" for who, value in result["notes"].get("peaks", {}).items()
        ]
    void = (
        f"\nVoid: 2 threads were less than {PARALLEL} times as fast as one, before or after, so that others ran, too.\n"
    )
    return "\n".join([*lines, void, *seconds])


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Step time against layers, with the line through them, and against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "performance", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, name, label in zip(axes, ("growth-layers", "growth-ranks"), ("layers", "ranks on 2 cores"), strict=True):
        result = results[name]
        points = [(int(x), 1e3 * seconds) for x, seconds in result["seconds"].items()]
        axis.plot(*zip(*points, strict=True), "o", color="#1f77b4")
        if "slope" in result["notes"]:
            ends = (points[0][0], points[-1][0])
            values = [1e3 * (result["notes"]["intercept"] + result["notes"]["slope"] * x) for x in ends]
            axis.plot(ends, values, color="#888888", linewidth=1)
        axis.set(xlabel=label, ylabel="ms a step, measured", ylim=(0, None))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    results = json.loads(RESULTS.read_text())
    replace_section(PAGE, "step time", tables(results))
    if {"growth-layers", "growth-ranks"} <= results.keys():
        draw(results, PLOT)


if __name__ == "__main__":
    main()
