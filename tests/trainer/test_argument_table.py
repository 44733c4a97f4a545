"""The table of arguments and methods is complete, current, and names tests that exist."""

import pytest

from tests.trainer import argument_table


@pytest.mark.parametrize("kind", ["arguments", "methods"])
def test_every_name_of_the_pinned_transformers_is_in_the_table_once(kind):
    assert sorted(argument_table.declared()[kind]) == sorted(argument_table.in_transformers()[kind])


def test_every_entry_names_a_test_that_exists():
    for table in argument_table.declared().values():
        for name, entry in table.items():
            file, text = argument_table.file_and_text(entry["test"])
            assert text in file.read_text(), f"{name}: {entry['test']}"


def test_the_page_is_current():
    expected = argument_table.page()
    assert argument_table.PAGE.read_text() == expected, "run python -m tests.trainer.argument_table"
