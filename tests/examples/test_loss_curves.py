"""The loss curves of the docs are those of one process, and the example that draws them runs without a network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "examples" / "loss_curves.py"


def within(curves, dtype):
    """Whether every curve is that of one process, as closely as its dtype allows."""
    expected = curves["one process"]
    for losses in curves.values():
        assert len(losses) == len(expected)
        if dtype == "float64":
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-6
        assert abs(sum(losses[-50:]) / sum(expected[-50:]) - 1) <= 0.01


def run(directory, *options):
    command = [sys.executable, str(SCRIPT), "--docs", str(directory / "docs"), *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (directory / "docs" / "loss_curves.svg").exists()
    return json.loads((directory / "docs" / "loss_curves.json").read_text())


def test_the_kept_curves_are_two_hundred_steps_of_every_layout_within_their_tolerances():
    kept = json.loads((ROOT / "docs" / "loss_curves.json").read_text())
    assert set(kept) == {"float64", "float32"}
    assert kept["float32"]["parameters"] > 9.5e6
    for dtype, result in kept.items():
        assert len(result["curves"]) == 6 and len(result["curves"]["one process"]) == 200
        expected = result["curves"]["one process"]
        assert sum(expected[-50:]) / 50 < expected[0] - 0.5  # it learns
        within(result["curves"], dtype)


@pytest.mark.full
def test_two_steps_of_one_layout(tmp_path):
    pytest.importorskip("matplotlib")
    curves = run(tmp_path, "--steps", "2", "--dtypes", "float64", "--layouts", "TP2 x PP2")["float64"]["curves"]
    assert set(curves) == {"one process", "TP2 x PP2"}
    within(curves, "float64")


@pytest.mark.full
def test_two_hundred_steps_of_every_layout_are_those_of_one_process(tmp_path):
    pytest.importorskip("matplotlib")
    curves = run(tmp_path, "--dtypes", "float64")["float64"]["curves"]
    assert len(curves) == 6 and len(curves["one process"]) == 200
