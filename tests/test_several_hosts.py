"""A job over two hosts trains as one process does, and knows where the border between them is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hosts

JOB = Path(__file__).with_name("several_hosts_job.py")
REASON = hosts.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH = 4  # rows of a step


def result_of(output: str):
    line = next(line for line in output.splitlines() if "RESULT" in line)
    return json.loads(line.split("RESULT", 1)[1])


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory) -> list[float]:
    arguments = json.dumps({"per_device_train_batch_size": BATCH})
    code = (
        "from tests.several_hosts_job import train; import json\n"
        f"print('RESULT', json.dumps(train('out', **{arguments})[1]))"
    )
    command = [sys.executable, "-c", code]
    directory = tmp_path_factory.mktemp("one")
    environment = {"PYTHONPATH": str(hosts.REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    output = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, env=environment)
    assert output.returncode == 0, output.stderr[-3000:]
    return result_of(output.stdout)


def test_replicas_on_two_hosts_hold_a_model_sharded_inside_each(tmp_path, losses_of_one_process):
    arguments = {"tensor_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    with hosts.two_hosts() as pair:
        result = result_of(pair.torchrun(JOB, str(tmp_path), json.dumps(arguments), processes_per_host=2))
    assert result["losses"] == pytest.approx(losses_of_one_process, rel=1e-5)
    assert result["nodes"] == [0, 0, 1, 1]
    assert "tp: 2 groups of 2, inside a chip" in result["placement"]
    assert "dp_shard: 2 groups of 2, across instances" in result["placement"] or (
        "dp_replicate: 2 groups of 2, across instances" in result["placement"]
    )
