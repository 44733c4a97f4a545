"""Writes docs/planner.md: how to plan, what the cost model is, and what it predicts beside what is published.

python benchmarks/planner_page.py [--docs outputs]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mics_scaling import rows as scaling_rows
from benchmarks.published import ROWS, Row, all_reduce_tables, left_out_predictions, parse, ratios_of, read
from optimum_trn.cost import CALIBRATION, FITTED, PRICES, get_machine
from optimum_trn.planning import StepEstimate, estimate_step, search
from optimum_trn.planning.search import deciding_term

HERE = Path(__file__).resolve().parent
GPU = "p4d.24xlarge"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def on_gpu(row: Row) -> tuple[str, StepEstimate]:
    """The best layout of the same training on as many GPU instances, and its step."""
    precision = "autocast" if row.workload.precision == "bf16_sr" else row.workload.precision
    work = replace(row.workload, machine=get_machine(GPU), precision=precision, flash_attention=True)
    best = search(work, keep=1).best[0]
    return str(best.layout), best.step


def throughput(rows: Sequence[Row], left_out: Sequence[float]) -> str:
    """Predicted beside published throughput."""
    lines = []
    for row, other in zip(rows, left_out, strict=True):
        predicted = row.predicted(CALIBRATION["trainium"])
        lines.append(
            [
                row.id,
                f"{row.workload.nodes} x {row.workload.machine.name}, {row.layout}",
                f"{predicted:,.2f}",
                f"{row.published:,.2f}",
                f"{predicted / row.published - 1:+.1%}",
                f"{other / row.published - 1:+.1%}",
                f"{row.constant_mfu / row.published - 1:+.1%}",
            ]
        )
    header = ["row", "configuration", "predicted, seq/s", "published, seq/s", "error", "left out", "constant MFU 0.30"]
    return table(header, lines)


def comparison(rows: Sequence[Row]) -> str:
    """Speed and cost beside the GPU instance."""
    prices = PRICES["trn1.32xlarge"].dollars_per_hour / PRICES[GPU].dollars_per_hour
    lines = []
    for row in rows:
        if row.workload.precision == "fp32":
            continue  # what float32 means on a GPU, TF32 or not, would decide
        layout, step = on_gpu(row)
        speed = estimate_step(row.workload, row.layout).sequences_per_second / step.sequences_per_second
        lines.append([row.id, row.workload.nodes, layout, f"{speed:.2f}", f"{1 - prices / speed:+.1%}"])
    return table(["row", "nodes", f"layout on {GPU}", "speed, predicted", "saving, predicted"], lines)


def choices(rows: Sequence[Row]) -> str:
    """The planner's choice beside the published layout."""
    lines = []
    for row in rows:
        if row.id not in ("N1", "N4"):
            continue
        best, published = search(row.workload, keep=1).best[0], estimate_step(row.workload, row.layout)
        term = deciding_term(published, best.step)
        lines.append([row.id, best.layout, row.layout, f"{published.seconds / best.step.seconds - 1:+.1%}", term])
    return table(["row", "chosen", "published", "published layout is slower by", "most of it in"], lines)


def page() -> str:
    """The whole page."""
    content = read(ROWS)
    rows, ratios = [parse(row) for row in content["rows"]], ratios_of(content)
    constants = CALIBRATION["trainium"]
    prices = PRICES["trn1.32xlarge"].dollars_per_hour / PRICES[GPU].dollars_per_hour
    worst = max(all_reduce_tables(content), key=lambda entry: abs(entry["error"]))
    scaling = [
        [
            f"{ratio.id}, 16 nodes",
            f"{ratio.predicted(constants):.3f}",
            f"{ratio.published:.3f}",
            f"{ratio.large.predicted(constants) / ratio.large.published - 1:+.1%}",
            f"{ratio.small.predicted(constants) / ratio.small.published - 1:+.1%}",
        ]
        for ratio in ratios
    ]
    mics = [
        [row["devices"], f"{row['mics_efficiency']:.2%}", f"{row['zero_3_efficiency']:.2%}"] for row in scaling_rows()
    ]
    return (
        (HERE / "planner_page.md")
        .read_text()
        .format(
            throughput=throughput(rows, left_out_predictions(rows, ratios)),
            fitted=table(["constant", "value"], [[f"`{name}`", f"{getattr(constants, name):g}"] for name in FITTED]),
            scaling=table(
                ["throughput a node, of that on one", "predicted", "published", "error, 16 nodes", "error, 1 node"],
                scaling,
            ),
            all_reduce=f"{abs(worst['error']):.0%} (all-reduce, {worst['id']}, {worst['bytes']:,} bytes)",
            choices=choices(rows),
            comparison=comparison(rows),
            equal=f"{1 - prices:.1%}",
            faster=f"{1 - prices / 1.246:.1%}",
            needed=f"{prices / (1 - 0.463):.3f}",
            mics=table(["devices", "MiCS, predicted", "ZeRO-3, predicted"], mics),
        )
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    options = parser.parse_args()
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "planner.md").write_text(page())


if __name__ == "__main__":
    main()
