"""The comparison of both Trainers by transformers' own tests tells every regression that has no reason."""

import pytest

from tests.conformance.suite import Outcome
from tests.conformance.trainer import Expectations, check_source, files_of, read, regressions, table

EXPECTATIONS = Expectations("1", "trn1.2xlarge", {"key": "why"}, {"known": "key"})
STOCK = {"good": Outcome("passed"), "known": Outcome("passed"), "bad": Outcome("failed")}


@pytest.mark.parametrize(
    "change, says",
    [
        ({}, None),
        (
            {"good": Outcome("failed", "its words")},
            "good passes with the stock Trainer and has failed with ours. its words",
        ),
        ({"good": Outcome("skipped")}, "good passes with the stock Trainer and has skipped with ours"),
        ({"good": None}, "It is gone"),
        ({"known": Outcome("passed")}, "known passes, and trainer_expectations.yaml says why it fails"),
        ({"bad": Outcome("passed")}, None),
    ],
)
def test_what_only_the_stock_trainer_passes_is_told(change, says):
    ours = STOCK | {"known": Outcome("failed")} | change
    found = regressions(STOCK, {name: outcome for name, outcome in ours.items() if outcome is not None}, EXPECTATIONS)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_a_directory_without_the_tests_says_where_to_get_them(tmp_path):
    with pytest.raises(RuntimeError, match="git clone"):
        check_source(tmp_path, read())


def test_files_for_several_processes_are_left_out(tmp_path):
    directory = tmp_path / "tests" / "trainer"
    directory.mkdir(parents=True)
    for name in ("test_trainer.py", "test_trainer_data.py", "test_trainer_fsdp.py", "trainer_test_utils.py"):
        (directory / name).touch()
    assert files_of(tmp_path) == ["test_trainer.py", "test_trainer_data.py"]


def test_the_table_counts_both():
    assert "| file.py | 2 / 1 / 0 | 1 / 0 / 1 |" in table(
        {"file.py": (STOCK, {"good": Outcome("passed"), "known": Outcome("skipped")})}
    )
