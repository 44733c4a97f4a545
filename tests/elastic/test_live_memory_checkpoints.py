"""Live: four nodes of two workers each are killed in every way, and go on, bit by bit, from the tier that is left."""

import pytest

from tests.elastic.memory_job import Job

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
# 16 bytes a parameter, of which 12 are saved: 5.4 million parameters are 64 MB.
LARGE = {"hidden": 128, "vocabulary": 20_000}


def went_on(job, tier, step, lost=0):
    """Every rank resumed at the step, from the tier, with exactly what it had when it recorded the step."""
    for resumed in job.resumed():
        assert (resumed["tier"], resumed["step"], resumed["lost_steps"]) == (tier, step, lost)
    for lines in job.records(step):
        before = next(line["digest"] for line in lines if "digest" in line)
        after = next(line["resumed"] for line in lines if "resumed" in line)
        assert after == before
    began = max(resumed["began"] for resumed in job.resumed())
    at = max(line["at"] for lines in job.records(step) for line in lines if "resumed" in line)
    return at - began


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path, 4, 2, save_steps=2, **LARGE) as job:
        job.start_workers(8, stop_at=5)
        job.wait_until_stopped()
        yield job


def resume(job):
    job.kill_workers()
    job.start_workers(6, resume="auto")
    job.wait()


def test_a_killed_worker_goes_on_from_local_memory(job):
    job.workers[3].kill()
    resume(job)
    seconds = went_on(job, "local memory", 5)
    print(f"recovered from local memory in {seconds:.2f} s")


def test_a_killed_node_goes_on_from_the_memory_of_its_peer(job):
    job.workers[2].kill()
    job.workers[3].kill()
    job.kill_agent(1)
    job.start_agent(1, wait=True)
    resume(job)
    seconds = went_on(job, "peer memory", 5)
    print(f"recovered from peer memory in {seconds:.2f} s")


def test_a_lost_group_goes_on_from_the_disk_and_what_is_lost_is_said(job):
    for node in (0, 1):
        job.kill_agent(node)
        job.start_agent(node, wait=True)
    resume(job)
    went_on(job, "persistent checkpoint", 4, lost=1)
    log = (job.directory / "worker-0.log").read_text()
    assert "Resuming step 4 from persistent checkpoint; 1 step of which parts were saved later is lost." in log
    assert "The memory that is left holds nothing of rank 0, 1, 2, 3." in log


def test_one_of_each_group_may_be_lost_at_once(job):
    for node in (1, 2):
        job.kill_agent(node)
        job.start_agent(node, wait=True)
    resume(job)
    went_on(job, "peer memory", 5)
