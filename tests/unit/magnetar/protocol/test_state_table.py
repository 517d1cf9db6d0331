"""A table of states: it covers its enum, allows what it lists, and nobody can change it."""

import enum
import itertools

import pytest

from magnetar.protocol.state_table import StateTable


class Door(enum.Enum):
    OPEN = "open"
    SHUT = "shut"
    NAILED_UP = "nailed up"


class Broken(Exception):
    pass


NEXT = {
    Door.OPEN: {Door.SHUT},
    Door.SHUT: {Door.OPEN, Door.NAILED_UP},
    Door.NAILED_UP: frozenset[Door](),
}


def table() -> StateTable[Door]:
    return StateTable(NEXT, defect=Broken)


@pytest.mark.parametrize(("now", "to"), list(itertools.product(Door, repeat=2)))
def test_a_move_is_made_if_it_is_listed_and_is_a_defect_otherwise(now: Door, to: Door) -> None:
    if to in NEXT[now]:
        assert table().move(now, to, "The door") is to
    else:
        with pytest.raises(Broken):
            table().move(now, to, "The door")


def test_an_invalid_move_names_its_owner_and_both_states() -> None:
    with pytest.raises(Broken) as caught:
        table().move(Door.NAILED_UP, Door.OPEN, "The door {} of {}", "{3}", "the house")
    assert str(caught.value) == (
        "The door {3} of the house cannot go from nailed up to open: report this as a defect."
    )


def test_a_table_that_forgets_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="NAILED_UP"):
        StateTable({Door.OPEN: {Door.SHUT}, Door.SHUT: {Door.OPEN}}, defect=Broken)


def test_a_table_reads_as_a_mapping_and_keeps_what_it_was_made_of() -> None:
    source = {state: set(after) for state, after in NEXT.items()}
    made = StateTable(source, defect=Broken)
    source[Door.NAILED_UP].add(Door.OPEN)
    del source[Door.SHUT]
    assert made == NEXT
    assert [state for state in made if not made[state]] == [Door.NAILED_UP]
    assert all(isinstance(after, frozenset) for after in made.values())
    with pytest.raises(TypeError):
        made[Door.NAILED_UP] = frozenset({Door.OPEN})  # type: ignore[index]
