"""The rules of attempts and groups: clean as they are, and none of them can be left out."""

import pytest

from tests.model.plans import LONG, MUTANTS, SHORT, Mutant, explored, without


@pytest.mark.parametrize("name", SHORT)
def test_the_rules_keep_every_promise(name: str) -> None:
    plan, least = SHORT[name]
    found = explored(plan)
    assert found.problem is None, found
    assert found.states > least, "less happened than is meant"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LONG)
def test_the_rules_keep_every_promise_in_more(name: str) -> None:
    plan, least = LONG[name]
    found = explored(plan)
    print(name, found)
    assert found.problem is None, found
    assert found.states > least, "less happened than is meant"


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=[f"{x.rule}-{type(x.shown_in).__name__}" for x in MUTANTS]
)
def test_a_rule_that_is_taken_out_is_missed(mutant: Mutant) -> None:
    found = without(mutant)
    print(mutant.rule, found)
    assert mutant.as_what in (found.problem or "clean"), found
    assert found.run, "the promise is broken from the start"
