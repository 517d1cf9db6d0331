"""The JSON of what brokers tell each other of replicated subscriptions."""

import json

import pytest

from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    MalformedPositions,
    PositionsTold,
    SubscriptionState,
)
from magnetar.protocol.ids import EARLIEST, Position

Told = SubscriptionState | PositionsTold | CopiesLeft | CopiesAnswered

VALUES: list[Told] = [
    SubscriptionState(Position(3, 4), {"s": Position(3, 5), "t": EARLIEST}, settled=True),
    SubscriptionState(Position(3, 4), {}, settled=True, began=Position(3, 1)),
    SubscriptionState(None, {}, settled=False, made_for=frozenset({"s"})),
    PositionsTold("east", 2**64 - 1, 7, frozenset({0, 3}), {"s": {0: Position(3, 5), 3: EARLIEST}}),
    PositionsTold("east", 1, 7, frozenset({0}), {"s": {0: EARLIEST}}, frozenset({"s"})),
    CopiesLeft(terminated=True, first={"s": {3: Position(9, 0)}}, missing=frozenset({"t"})),
    CopiesLeft(False, {}, late=frozenset({"s"}), from_start=frozenset({"t"})),
    CopiesAnswered("west", Position(3, 4), {"s": Position(3, 5)}, {"s": Position(2, 0)}, 2**63),
    CopiesAnswered("west", Position(3, 4), {}, {}, 5, frozenset({"s"}), Position(3, 1)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_json_gives_the_same_value(value: Told) -> None:
    assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_json_that_lacks_anything_is_refused(value: Told) -> None:
    members = value.to_json()
    for name in members:
        for damaged in (
            {key: each for key, each in members.items() if key != name},
            members | {name: object()},
        ):
            if isinstance(members[name], bool | str) and name in damaged:
                continue  # any value is taken for one of these
            with pytest.raises(MalformedPositions):
                type(value).from_json(damaged)
    with pytest.raises(MalformedPositions):
        type(value).from_json([])
