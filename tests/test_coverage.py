"""A sample of the coverage table, run as the benchmark runs it, and the table that is kept in the docs."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_sample_of_twenty_configurations_is_proven_on_two_processes():
    run = subprocess.run(
        [sys.executable, "benchmarks/coverage.py", "--sample"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    rows = re.findall(
        r"^(causal|masked|seq2seq|sequence|token|image|audio|question) +(\S+) +(\S+)", run.stdout, re.MULTILINE
    )
    assert len(rows) == 20
    assert [row for row in rows if row[2] != "proven"] == [("causal", "mamba", "refused")]


def test_nothing_in_the_table_is_wrong_and_every_bar_is_reached(monkeypatch):
    monkeypatch.setenv("OPTIMUM_TRN_DEVICE", "cpu")  # the benchmark sets it, which must not outlive this test
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.coverage import BARS
    from tests.models.zoo import KINDS, model_types

    rows = json.loads((ROOT / "docs" / "coverage.json").read_text())["rows"]
    assert not [row for row in rows if row["status"] == "WRONG"]
    assert {(row["kind"], row["type"]) for row in rows} == {(k, name) for k in KINDS for name in model_types(k)}
    for kind, bar in BARS.items():
        assert sum(row["kind"] == kind and row["status"] == "proven" for row in rows) >= bar
