"""docs/pulsar-admin.md is printed from the table of operations, whose tests exist."""

from pathlib import Path

import pytest

from scripts.print_admin_operations import ANSWERED, PAGE, page, table

ROOT = Path(__file__).parents[2]
TABLE = table()


def test_the_page_of_operations_is_as_the_table_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "print it: python -m scripts.print_admin_operations"


def test_no_operation_is_in_the_table_twice() -> None:
    names = [each.full_name for each in TABLE.operations]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("test", TABLE.tests)
def test_a_test_that_shows_an_effect_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize("test", TABLE.tests)
def test_each_pattern_names_an_operation_that_is_answered(test: str) -> None:
    for pattern in TABLE.tests[test]:
        named = [each for each in TABLE.operations if each.is_named(pattern)]
        assert any(each.outcome == ANSWERED for each in named), pattern


def test_what_has_no_effect_is_answered() -> None:
    answered = {each.full_name for each in TABLE.operations if each.outcome == ANSWERED}
    assert TABLE.without_effect.keys() <= answered
