"""Predicted throughput beside published throughput.

    python benchmarks/published.py                   # calibration rows, one left out, ratios, all-reduce tables
    python benchmarks/published.py --rows FILE.yaml  # any rows in the form of published.yaml; --json for machines
    python benchmarks/published.py --fit             # where the fitted constants of cost/calibration.py come from

A row is `{id, model_type, config, instance, nodes, layout, seq_len, global_batch, micro_batch, precision, recompute,
optimizer, published: {sequences_per_second, release}}`: config are fields of the Hugging Face configuration, layout
fields of ParallelConfig; models that are pretrained with masked tokens have the next-sentence head too. Everything
printed under `predicted` is the cost model's; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoConfig

from optimum_trn.cost import CALIBRATION, FITTED, Calibration, get_machine
from optimum_trn.cost.collectives import Group, all_reduce
from optimum_trn.parallel import ParallelConfig
from optimum_trn.planning import Layout, Workload, architecture_of, estimate_step

ROWS = Path(__file__).with_suffix(".yaml")
CONSTANT_MFU = 0.30

PRIORS: dict[str, tuple[float, float]] = {
    "vector_efficiency": (0.6, 0.3),
    "memory_efficiency": (0.8, 0.2),
    "concurrency": (0.7, 0.2),
    "launch_seconds": (10e-3, 1.0),
    "node_variation": (0.02, 0.5),
}
"""The expected value, and its standard deviation (of the logarithm; of the value for concurrency): six rows can't
choose five constants alone. Rough guesses, which were revised with the rows in view: no independent knowledge."""
ROW_DEVIATION, RATIO_DEVIATION = 0.04, 0.01
"""How far the model may be from a row (of its logarithm) and from a ratio, in the same sense."""


@dataclass(frozen=True)
class Row:
    """One published configuration."""

    id: str
    workload: Workload
    layout: Layout
    published: float
    release: str

    def predicted(self, calibration: Calibration) -> float:
        """Sequences a second."""
        return float(estimate_step(self.workload, self.layout, calibration).sequences_per_second)

    @property
    def constant_mfu(self) -> float:
        """Sequences a second at a constant utilisation, as AWS counts it: 12 L h s (6 h + s) FLOPs a sequence."""
        work = self.workload
        shape, length = work.architecture, work.sequence_length
        flops = 12 * shape.layers * shape.hidden * length * (6 * shape.hidden + length)
        peak = work.machine.core.mfu_flops["fp32" if work.precision == "fp32" else "bf16"]
        return CONSTANT_MFU * peak * work.world_size / flops


def parse(row: dict[str, Any]) -> Row:
    """A row of a file; ValueError names the row for one that is not in the form above."""
    try:
        recompute = None if row["recompute"] == "none" else row["recompute"]
        workload = Workload(
            architecture=architecture_of(AutoConfig.for_model(row["model_type"], **row["config"])),
            machine=get_machine(row["instance"]),
            nodes=row["nodes"],
            sequence_length=row["seq_len"],
            global_batch=row["global_batch"],
            precision=row["precision"],
            optimizer=row["optimizer"],
        )
        layout = Layout(ParallelConfig(**{**row["layout"], "recompute": recompute}), row["micro_batch"])
        layout.micro_batches(workload)
        published = row["published"]
        return Row(
            str(row["id"]), workload, layout, float(published["sequences_per_second"]), str(published["release"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Row {row.get('id', row)!r} can't be read: {type(error).__name__}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """The file, as a mapping with `rows`, which may be all there is."""
    content = yaml.safe_load(path.read_text())
    return content if isinstance(content, dict) else {"rows": content}


@dataclass(frozen=True)
class Ratio:
    """Published throughput a node of a larger run, as a part of that of a smaller one."""

    id: str
    large: Row
    small: Row

    @property
    def published(self) -> float:
        return self.large.published / self.large.workload.nodes / (self.small.published / self.small.workload.nodes)

    def predicted(self, calibration: Calibration) -> float:
        large, small = self.large, self.small
        return (
            large.predicted(calibration) / large.workload.nodes / (small.predicted(calibration) / small.workload.nodes)
        )


def ratios_of(content: dict[str, Any]) -> list[Ratio]:
    """The scaling ratios of a file: a row, and what a run on one node has that differs."""
    return [
        Ratio(entry["id"], parse(entry["row"]), parse({**entry["row"], **entry["one_node"]}))
        for entry in content.get("ratios", ())
    ]


# ---- The fit ---------------------------------------------------------------------------------------------------------


def constants(place: Sequence[float]) -> Calibration:
    """The constants at a place in units of their priors' deviations."""
    values = {}
    for name, step in zip(FITTED, place, strict=True):
        mean, deviation = PRIORS[name]
        value = mean + deviation * step if name == "concurrency" else mean * math.exp(deviation * step)
        values[name] = min(max(value, 0.0), 0.95) if name == "concurrency" else value
        if name.endswith("efficiency"):
            values[name] = min(values[name], 1.0)
    return CALIBRATION["trainium"].with_values(**values)


def fit(rows: Sequence[Row], ratios: Sequence[Ratio], start: Sequence[float] | None = None) -> list[float]:
    """The most probable place of the constants: least squares with the priors."""

    def badness(place: Any) -> float:
        chosen = constants(place)
        squares = [math.log(row.predicted(chosen) / row.published) / ROW_DEVIATION for row in rows]
        squares += [(ratio.predicted(chosen) - ratio.published) / RATIO_DEVIATION for ratio in ratios]
        return float(sum(value**2 for value in (*squares, *place)))

    return nelder_mead(badness, [0.0] * len(FITTED) if start is None else list(start), 250 if start is None else 100)


def nelder_mead(function: Callable[[Any], float], start: Sequence[float], iterations: int) -> list[float]:
    """The minimum of a function of a few numbers (Nelder and Mead 1965), on a fixed budget."""
    corners = [np.array(start, float) + 0.7 * row for row in np.vstack([np.zeros(len(start)), np.eye(len(start))])]
    values = [function(corner) for corner in corners]
    for _ in range(iterations):
        order = np.argsort(values)
        corners, values = [corners[i] for i in order], [values[i] for i in order]
        centre = np.mean(corners[:-1], axis=0)
        away = centre - corners[-1]
        reflected, expanded, contracted = centre + away, centre + 2 * away, centre - 0.5 * away
        value = function(reflected)
        if value < values[0] and (further := function(expanded)) < value:
            corners[-1], values[-1] = expanded, further
        elif value < values[-2]:
            corners[-1], values[-1] = reflected, value
        elif (nearer := function(contracted)) < values[-1]:
            corners[-1], values[-1] = contracted, nearer
        else:
            corners = [corners[0], *[corners[0] + 0.5 * (corner - corners[0]) for corner in corners[1:]]]
            values = [values[0], *[function(corner) for corner in corners[1:]]]
    best = corners[int(np.argmin(values))]
    return [float(value) for value in best]


def left_out_predictions(rows: Sequence[Row], ratios: Sequence[Ratio]) -> list[float]:
    """Of every row, what constants that are fitted on the others predict."""
    start = place_of(CALIBRATION["trainium"])
    fits = (fit([*rows[:place], *rows[place + 1 :]], ratios, start) for place in range(len(rows)))
    return [row.predicted(constants(fitted)) for row, fitted in zip(rows, fits, strict=True)]


def place_of(calibration: Calibration) -> list[float]:
    """Where the constants are, in units of their priors' deviations."""
    found = []
    for name in FITTED:
        (mean, deviation), value = PRIORS[name], getattr(calibration, name)
        found.append((value - mean) / deviation if name == "concurrency" else math.log(value / mean) / deviation)
    return found


# ---- Output ----------------------------------------------------------------------------------------------------------


def compare(rows: Sequence[Row], left_out: Sequence[float] = ()) -> dict[str, Any]:
    """Every row's prediction and errors, and their median and worst."""
    found = []
    for place, row in enumerate(rows):
        predicted = row.predicted(CALIBRATION[row.workload.machine.vendor])
        entry = {
            "id": row.id,
            "published": row.published,
            "release": row.release,
            "predicted": predicted,
            "error": predicted / row.published - 1,
            "constant_mfu_error": row.constant_mfu / row.published - 1,
        }
        if left_out:
            entry["left_out_error"] = left_out[place] / row.published - 1
        found.append(entry)

    def summary(key: str, among: Sequence[dict[str, Any]]) -> dict[str, float]:
        errors = [abs(entry[key]) for entry in among]
        return {"median": median(errors), "worst": max(errors)}

    half = [entry for entry, row in zip(found, rows, strict=True) if row.workload.precision != "fp32"]
    result: dict[str, Any] = {"rows": found, "error": summary("error", found)}
    result["constant_mfu_error"] = summary("constant_mfu_error", found)
    if half:
        result["constant_mfu_error_bf16"] = summary("constant_mfu_error", half)
    if left_out:
        result["left_out_error"] = summary("left_out_error", found)
    return result


def all_reduce_tables(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Published times of nccom-test by size, in microseconds, beside the model's."""
    found = []
    for table in content.get("all_reduce", ()):
        machine = get_machine(table["instance"])
        ranks = Group(table["ranks"], table["ranks"] // table["nodes"])
        for size, published in table["microseconds"].items():
            predicted = all_reduce(float(size), ranks, machine) * 1e6
            found.append(
                {
                    "id": table["id"],
                    "bytes": size,
                    "published": published,
                    "predicted": predicted,
                    "error": predicted / published - 1,
                }
            )
    return found


def show(result: dict[str, Any]) -> None:
    """The result as text; median and worst error are the last line."""
    for entry in result.get("all_reduce", ()):
        print(
            f"all-reduce {entry['id']} {entry['bytes']:>12,} bytes  predicted {entry['predicted']:9.0f} us  "
            f"published {entry['published']:9.0f} us  error {entry['error']:+7.1%}"
        )
    for entry in result.get("ratios", ()):
        print(
            f"scaling {entry['id']:28} predicted {entry['predicted']:.3f}  published {entry['published']:.3f}  "
            f"off by {100 * (entry['predicted'] - entry['published']):+.1f} points; the runs themselves are off by "
            f"{entry['large_error']:+.1%} and, on one node, {entry['small_error']:+.1%}"
        )
    for entry in result["rows"]:
        left_out = f"  left out {entry['left_out_error']:+7.1%}" if "left_out_error" in entry else ""
        print(
            f"{entry['id']:12} predicted {entry['predicted']:10.2f} seq/s  published {entry['published']:10.2f} seq/s "
            f"({entry['release']})  error {entry['error']:+7.1%}  constant MFU {CONSTANT_MFU:.2f} "
            f"{entry['constant_mfu_error']:+7.1%}{left_out}"
        )
    if "constant_mfu_error_bf16" in result:
        bf16 = result["constant_mfu_error_bf16"]
        print(f"constant MFU, bfloat16 rows only: median {bf16['median']:.1%}, worst {bf16['worst']:.1%}")
    constant = result["constant_mfu_error"]
    print(f"constant MFU, all rows: median {constant['median']:.1%}, worst {constant['worst']:.1%}")
    if "left_out_error" in result:
        print(f"leave one row out: worst {result['left_out_error']['worst']:.1%}")
    print(f"median error {result['error']['median']:.1%}, worst error {result['error']['worst']:.1%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fit", action="store_true", help="print constants fitted on the rows of the file and stop")
    options = parser.parse_args(arguments)
    try:
        content = read(options.rows)
        rows, ratios = [parse(row) for row in content["rows"]], ratios_of(content)
    except (OSError, KeyError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    if options.fit:
        fitted = constants(fit(rows, ratios))
        print(json.dumps({name: float(getattr(fitted, name)) for name in FITTED}, indent=2))
        return
    left_out = left_out_predictions(rows, ratios) if options.rows.resolve() == ROWS.resolve() else []
    result = compare(rows, left_out)
    calibration = CALIBRATION["trainium"]
    result["ratios"] = [
        {
            "id": ratio.id,
            "predicted": ratio.predicted(calibration),
            "published": ratio.published,
            "large_error": ratio.large.predicted(calibration) / ratio.large.published - 1,
            "small_error": ratio.small.predicted(calibration) / ratio.small.published - 1,
        }
        for ratio in ratios
    ]
    result["all_reduce"] = all_reduce_tables(content)
    print(json.dumps(result, indent=2)) if options.json else show(result)


if __name__ == "__main__":
    main()
