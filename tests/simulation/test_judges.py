"""What the judges of a run find, and what they let pass, in histories made by hand."""

import pytest

from tests.simulation.checker import Checker
from tests.simulation.hand_overs import broken_hand_overs
from tests.simulation.history import Delivered, History, Message

TOPIC = "topic://public/default/migrated0"
FIRST, SECOND = (f"persistent://public/default/migrated0-partition-{index}" for index in (0, 1))
CHILD = "segment://public/default/migrated0/0000-7fff-2"
GRANDCHILD = "segment://public/default/migrated0/0000-3fff-4"
STORED = {"a-5": [FIRST], "a-6": [SECOND], "a-8": [FIRST]}
"""By a program before the migration: partition 1 has no id above 6."""


def sent(history: History, name: str) -> None:
    producer, _, number = name.partition("-")
    history.messages[name] = Message(name, TOPIC, "k", producer, int(number), True, once=True)


def delivered(
    history: History,
    name: str,
    segment: str,
    entry: int,
    *,
    consumer: str = "q",
    at: float = 0.0,
    attachment: int = 0,
    stale: bool = False,
) -> None:
    history.deliveries.append(
        Delivered("s", name, segment, (1, entry), consumer, at, at, 0, stale, attachment)
    )


def stored_twice(stored: dict[str, list[str]]) -> list[str]:
    """The messages that the checker names, if each is stored on these segments."""
    history = History(lambda: 0.0)
    history.partitions[TOPIC] = [FIRST, SECOND]
    for name, segments in stored.items():
        sent(history, name)
        for entry, segment in enumerate(segments):
            delivered(history, name, segment, 10 * history.messages[name].number + entry)
    found = Checker(history, {}, ordered=[]).violations()
    return [each.split()[1] for each in found if each.startswith("twice: ")]


@pytest.mark.parametrize(
    ("name", "segments", "wrong"),
    [
        pytest.param("a-8", [FIRST, CHILD], False, id="above the last id of a partition"),
        pytest.param("a-5", [FIRST, CHILD], True, id="below the last ids of all partitions"),
        pytest.param("a-6", [SECOND, CHILD], True, id="the lowest last id itself"),
        pytest.param("a-8", [FIRST, CHILD, GRANDCHILD], True, id="on two segments"),
        pytest.param("a-8", [FIRST, FIRST], True, id="twice on a partition"),
        pytest.param("a-9", [CHILD, GRANDCHILD], True, id="sent after the migration"),
    ],
)
def test_checker_finds_messages_stored_twice_over_a_migration(
    name: str, segments: list[str], wrong: bool
) -> None:
    assert stored_twice(STORED | {name: segments}) == ([name] if wrong else [])


def test_checker_lets_pass_what_a_partition_without_the_producer_may_lack() -> None:
    assert not stored_twice({"a-5": [FIRST, CHILD]})


@pytest.mark.parametrize("replaced", [False, True])
def test_message_at_two_consumers_is_found_unless_one_is_of_a_replaced_broker(
    replaced: bool,
) -> None:
    """That the first consumer gets more shows that it is attached, if the owner sent it."""
    history = History(lambda: 0.0)
    for name in ("b-1", "c-2"):
        sent(history, name)
    delivered(history, "b-1", CHILD, 1, consumer="s1", at=1.0, attachment=1)
    delivered(history, "b-1", CHILD, 1, consumer="s2", at=2.0, attachment=2)
    delivered(history, "c-2", CHILD, 0, consumer="s1", at=3.0, attachment=1, stale=replaced)
    found = list(broken_hand_overs(history, "s", lambda txn: None))
    assert found == (
        [] if replaced else [f"hand-over: b-1 was sent to s2 at {2:.6f} s, while s1 had it"]
    )
