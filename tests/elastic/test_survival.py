"""Killed processes cost no committed step, no sample and no digit: the survivors go on."""

import random

import pytest
from transformers import LlamaForCausalLM

from benchmarks import survival


@pytest.mark.full
def test_two_killed_one_after_the_other_leave_the_losses_of_an_undisturbed_run(tmp_path):
    reference = survival.undisturbed(tmp_path / "undisturbed")
    assert reference.code == 0 and len(reference.commits) == 20
    outcome = survival.disturbed(tmp_path / "disturbed", random.Random(0))
    assert survival.faults(outcome, reference, seconds=60.0) == []  # how long it takes is for the benchmark
    assert len(outcome.kills) == 2


@pytest.mark.full
def test_a_node_that_comes_back_is_folded_in(tmp_path):
    arguments = ("--steps", "12", "--minimum-nodes", "1", "--untied")
    reference = survival.Job(tmp_path / "undisturbed", 2, 1, *arguments).finish()
    arguments += ("--pause-at", "6", "--save-steps", "5")
    job = survival.Job(tmp_path / "disturbed", 2, 1, *arguments, launch=("--max-restarts", "1"))
    try:
        job.wait_for("committed", 2)
        job.kill(0)
        job.wait_for("prepared", 3)  # of all, of those that are left, and with the one that has come back
        (tmp_path / "disturbed" / "go").touch()
        outcome = job.finish()
    finally:
        job.end()
    assert survival.faults(outcome, reference, seconds=600.0) == []
    members = [[m["member"] for m in event["members"]] for event in outcome.journal if event["event"] == "prepared"]
    assert members == [[0, 1], [1], [1, 2]]
    assert {event["generation"] for event in outcome.commits} == {1, 2, 3}
    # Whoever was first when a checkpoint was due has written it, whole.
    for checkpoint in ("checkpoint-5", "checkpoint-10"):
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "disturbed" / "model" / checkpoint)
        assert all(parameter.isfinite().all() for parameter in saved.parameters())
