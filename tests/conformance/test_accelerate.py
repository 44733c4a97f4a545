"""accelerate's scripts and tests say on the device what expectations.yaml says; a sample of them in every test run."""

import pytest

from tests.conformance.__main__ import TABLE, document
from tests.conformance.source import DownloadError, source_directory
from tests.conformance.suite import Outcome, Run, check_version, differences, execute, read

SUITE = read()


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "run", [pytest.param(run, id=run.name, marks=[] if run.sample else pytest.mark.full) for run in SUITE.runs]
)
def test_accelerate_says_what_is_expected(run):
    check_version(SUITE)
    if not run.is_script:
        try:
            source_directory()
        except (
            DownloadError
        ) as error:  # `make conformance` fails here; the suite of a checkout must pass without a network
            pytest.skip(str(error))
    assert not (found := differences(run, execute(run, SUITE.instance))), "\n".join(found)


def test_the_table_in_the_docs_is_that_of_the_expectations():
    assert TABLE.read_text() == document(SUITE), "run `make conformance`"


EXPECTED = Run("run", (), passed=1, failed={"bad": "why"}, skipped={"not here": "why"})
AS_EXPECTED = {"good": Outcome("passed"), "bad": Outcome("failed"), "not here": Outcome("skipped")}


@pytest.mark.parametrize(
    "change, says",
    [
        ({}, None),
        ({"good": Outcome("failed", "why it did")}, "good failed, but was expected to have passed. why it did"),
        ({"bad": Outcome("passed")}, "bad passed, but was expected to have failed"),
        ({"good": Outcome("skipped")}, "good skipped, but was expected to have passed"),
        ({"bad": None}, "bad was expected to have failed, but is gone"),
        ({"good": None}, "0 tests passed, but 1 were expected to"),
    ],
)
def test_any_difference_is_told_in_either_direction(change, says):
    outcomes = {name: outcome for name, outcome in (AS_EXPECTED | change).items() if outcome is not None}
    found = differences(EXPECTED, outcomes)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
