"""The example of jobs that share a core, with real processes: nothing is lost, and training does not notice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.full
def test_training_makes_way_and_fifty_requests_survive_a_killed_store(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / "share_cores.py"), "--output_dir", str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-5000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["same_losses_as_undisturbed"] and len(summary["losses"]) == 20
    assert len(summary["switch_seconds"]) == 1
    assert summary["serving"]["answered"] == 50 and summary["serving"]["in_order"]
    assert min(summary["serving"]["by_core"]) >= 15
