"""The rules of writes, acknowledgements and ids: clean as they are, and none can be left out.

How many states there are, and how long the shortest run to a broken promise is, is as it was
found: another number says that the model has changed, or that not all of it was explored.
"""

import pytest

from tests.model.rules import (
    LONG,
    LONG_MUTANTS,
    MUTANTS,
    NIGHTLY,
    ORDER_MUTANTS,
    QUICK,
    TRIED,
    TRIED_CLEAN,
    TRIED_STUCK,
    Clean,
    Missed,
    explored,
)

MISSED = MUTANTS | ORDER_MUTANTS | TRIED_STUCK


def require_clean(clean: Clean) -> None:
    found = explored(clean.scope)
    assert found.problem is None, found
    assert found.states == clean.states


def require_missed(missed: Missed) -> None:
    found = explored(missed.scope)
    print(found)
    assert missed.as_what in (found.problem or "clean"), found
    assert len(found.run) == missed.steps, found


@pytest.mark.parametrize("name", QUICK)
def test_the_rules_keep_every_promise(name: str) -> None:
    require_clean(QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_the_rules_keep_every_promise_in_more(name: str) -> None:
    require_clean(LONG[name])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NIGHTLY)
def test_the_rules_keep_every_promise_in_most(name: str) -> None:
    require_clean(NIGHTLY[name])


@pytest.mark.parametrize("name", MISSED)
def test_a_rule_that_is_taken_out_is_missed(name: str) -> None:
    require_missed(MISSED[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_MUTANTS)
def test_a_rule_that_is_taken_out_is_missed_in_more(name: str) -> None:
    require_missed(LONG_MUTANTS[name])


@pytest.mark.parametrize("name", TRIED)
def test_what_was_tried_instead_goes_wrong_as_it_is_told(name: str) -> None:
    for question, missed in TRIED[name].missed().items():
        found = explored(missed.scope)
        assert len(found.run) == missed.steps, (question, str(found))
        assert (found.problem is None) == (not missed.steps), (question, str(found))
        assert missed.as_what in (found.problem or missed.as_what), (question, str(found))


@pytest.mark.parametrize("name", TRIED_CLEAN)
def test_what_was_tried_instead_keeps_what_it_is_said_to_keep(name: str) -> None:
    found = explored(TRIED_CLEAN[name])
    assert found.problem is None, found
