"""The questions of clusters about subscriptions of a scalable topic, with owners that are made up.

Whole clusters are in `tests/unit/broker/replication`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
from structlog.testing import capture_logs

from broker.placement.placement import OneBroker
from broker.scalable import layout as layouts
from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import ScalableTopicRecord
from broker.scalable.segment_requests import (
    CreateSubscription,
    NoteComplete,
    TakeAnswer,
    TakePositions,
    ViewSubscriptions,
)
from broker.scalable.segments import Segments
from broker.scalable.subscription_exchange import SubscriptionExchange
from broker.scalable.topic_store import ScalableTopicNotFound, StoredTopic
from broker.topics.completeness import Completeness
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionsLeft,
    SubscriptionState,
)
from magnetar.errors import NotAllowed, ServiceNotReady
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.names import TopicName, parse_topic_name
from storage.metadata.store import Version
from tests.support.bounds import set_bound
from tests.support.clocks import FakeClock
from tests.support.waiting import until
from tests.unit.txn.virtual_time import in_virtual_time

TOPIC = parse_topic_name("topic://public/default/t")
PERIOD_S = 0.01
HERE, THERE = 77, 66
"""The incarnations of the topic in both clusters."""


def at(entry_id: int) -> Position:
    return Position(5, entry_id)


class Owners:
    """The owners of a topic's segments."""

    def __init__(self) -> None:
        self.states: dict[int, SubscriptionState | Exception] = {}
        self.left: dict[int, CopiesLeft | Exception] = {}
        self.views = 0
        self.told: list[tuple[int, PositionsTold]] = []
        self.answers: list[tuple[int, CopiesAnswered]] = []
        self.made: list[tuple[int, str]] = []
        self.complete: list[tuple[int, str, list[str]]] = []
        self.refused: set[str] = set()
        """Subscriptions that are not made."""
        self.on_view: Callable[[], None] = lambda: None

    async def ask(self, request: object) -> object:
        if isinstance(request, ViewSubscriptions):
            self.views += 1
            self.on_view()
            return self._found(self.states[request.segment.segment_id])
        if isinstance(request, TakePositions):
            self.told.append((request.segment.segment_id, request.told))
            return self._found(self.left[request.segment.segment_id])
        if isinstance(request, TakeAnswer):
            self.answers.append((request.segment.segment_id, request.answered))
            return None
        if isinstance(request, NoteComplete):
            segment_id = request.segment.segment_id
            self.complete.append((segment_id, request.cluster, [*request.names]))
            found = cast("CopiesLeft", self.left[segment_id])
            self.left[segment_id] = replace(found, late=found.late - {*request.names})
            return None
        assert isinstance(request, CreateSubscription)
        assert request.replicated
        assert request.completeness == Completeness(made_for="west")
        assert request.start == EARLIEST
        if request.name in self.refused:
            raise NotAllowed("There are too many.")
        segment_id = request.segment.segment_id
        self.made.append((segment_id, request.name))
        found = cast("CopiesLeft", self.left[segment_id])
        first = {**found.first, request.name: {0: at(4)}}
        self.left[segment_id] = replace(found, first=first, missing=found.missing - {request.name})
        return None

    @staticmethod
    def _found(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value


class West:
    """The other cluster."""

    def __init__(self) -> None:
        self.questions: list[PositionsTold] = []
        self.answer: SubscriptionsLeft | Exception = SubscriptionsLeft(THERE, {})

    async def tell_positions(
        self, cluster: str, topic: TopicName, told: PositionsTold
    ) -> SubscriptionsLeft:
        assert (cluster, topic) == ("west", TOPIC)
        self.questions.append(told)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class East:
    """A broker that leads the topic."""

    def __init__(self) -> None:
        self.owners, self.west = Owners(), West()
        self.layout = layouts.initial(2, now_ms=1)
        self.is_there, self.reads = True, 0
        self.exchange = SubscriptionExchange(
            OneBroker("127.0.0.1"),
            cast("Segments", self.owners),
            self._read,
            self._incarnation_of,
            self.west,
            "east",
            FakeClock(1234),
            period_s=PERIOD_S,
        )

    async def _read(self, topic: TopicName) -> LiveTopic:
        self.reads += 1
        if not self.is_there:
            raise ScalableTopicNotFound("It was deleted.")
        return LiveTopic(StoredTopic(topic, ScalableTopicRecord(self.layout), Version(1)))

    async def _incarnation_of(self, live: LiveTopic) -> int:
        return HERE

    def have(self, *, settled: bool, **below: Mapping[int, Position]) -> None:
        """Owners that say so of each subscription, and that the other cluster has all up to 9."""
        for segment_id in self.layout.segments:
            found = {name: each[segment_id] for name, each in below.items() if segment_id in each}
            self.owners.states[segment_id] = SubscriptionState(at(9), found, settled)

    async def is_quiet(self) -> None:
        """Wait until nothing is asked any more."""
        await until(lambda: not self.exchange.status(TOPIC))


@pytest.fixture
async def east() -> AsyncIterator[East]:
    made = East()
    yield made
    await made.exchange.stop()


async def test_a_cluster_is_told_of_all_segments_and_its_answer_reaches_their_owners(
    east: East,
) -> None:
    east.have(settled=False, s={0: at(3), 1: at(4)}, t={1: EARLIEST})
    east.west.answer = SubscriptionsLeft(THERE, {"s": {0: at(7), 1: at(8)}})
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: len(east.owners.answers) == 2)
    assert east.west.questions[0] == PositionsTold(
        "east", HERE, 0, frozenset({0, 1}), {"s": {0: at(3), 1: at(4)}, "t": {1: EARLIEST}}
    )
    # What the cluster did not answer is not told it yet.
    assert dict(east.owners.answers) == {
        0: CopiesAnswered("west", at(9), {"s": at(3)}, {"s": at(7)}, THERE),
        1: CopiesAnswered("west", at(9), {"s": at(4)}, {"s": at(8)}, THERE),
    }
    assert await east.exchange.view(TOPIC) == {
        "west": {"answeredMs": 1234, "notReplicated": [], "late": []}
    }


async def test_nothing_is_asked_once_all_owners_have_nothing_to_tell(east: East) -> None:
    east.have(settled=True, s={0: at(3), 1: at(4)})
    east.west.answer = SubscriptionsLeft(THERE, {"s": {0: at(3), 1: at(4)}})
    east.exchange.ask_soon(TOPIC, "west")
    # Once, in any case: of segments that were pruned no owner tells.
    await until(lambda: len(east.west.questions) == 1)
    await east.is_quiet()
    assert len(east.west.questions) == 1


async def test_a_cluster_is_asked_until_it_has_acknowledged_all_with_the_segments_of_now(
    east: East,
) -> None:
    east.have(settled=True, s={0: at(3), 1: at(4)})
    # It has not read all of its logs, and so not all copies of segments that were pruned.
    east.west.answer = SubscriptionsLeft(THERE, {"s": {0: at(3), 1: EARLIEST}})
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: len(east.west.questions) == 2)
    east.west.answer = ServiceNotReady("Not now.")
    await until(lambda: len(east.west.questions) == 4)
    east.layout = layouts.split(east.layout, 0, now_ms=1).layout
    east.have(settled=True, s={0: at(3), 1: at(4)})
    east.west.answer = SubscriptionsLeft(THERE, {"s": {0: at(3), 1: at(5)}})
    await east.is_quiet()
    assert east.west.questions[-1].segments == east.layout.segments.keys()


async def test_a_reminder_that_comes_while_owners_are_asked_the_last_time_is_not_lost(
    east: East,
) -> None:
    east.have(settled=True)

    def remind_once() -> None:
        if east.owners.views == 2:
            east.exchange.ask_soon(TOPIC, "west")

    east.owners.on_view = remind_once
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: east.owners.views == 4)
    await east.is_quiet()


async def test_nothing_is_told_of_a_segment_whose_owner_does_not_answer(east: East) -> None:
    east.have(settled=True, s={0: at(3), 1: at(4)})
    east.owners.states[1] = ServiceNotReady("It moves.")
    east.west.answer = SubscriptionsLeft(THERE, {"s": {0: at(7), 1: at(8)}})
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: len(east.owners.answers) > 1)
    assert east.west.questions[0].below == {"s": {0: at(3)}}
    assert east.west.questions[0].segments == {0, 1}
    assert {segment_id for segment_id, _ in east.owners.answers} == {0}


async def test_a_segment_without_a_replicator_is_not_told_of(east: East) -> None:
    east.have(settled=False, s={0: at(3)})
    east.owners.states[1] = SubscriptionState(None, {"s": at(4)}, settled=True)
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: bool(east.west.questions))
    assert east.west.questions[0].below == {"s": {0: at(3)}}


async def test_a_refusal_is_logged_once_and_tried_again_until_it_is_answered(east: East) -> None:
    east.have(settled=False, s={0: at(3), 1: at(4)})
    east.west.answer = ServiceNotReady("Not now.")
    with capture_logs() as logs:
        east.exchange.ask_soon(TOPIC, "west")
        await until(lambda: len(east.west.questions) > 2)
    assert await east.exchange.view(TOPIC) == {
        "west": {"failure": "Not now.", "notReplicated": [], "late": []}
    }
    assert [each["event"] for each in logs] == ["subscription_positions_not_told"]
    east.have(settled=True)
    east.west.answer = SubscriptionsLeft(THERE, {})
    await east.is_quiet()


@in_virtual_time
async def test_a_cluster_is_asked_less_often_while_its_answer_stays_the_same() -> None:
    east, now_s = East(), asyncio.get_running_loop().time
    asked_s: list[float] = []
    east.owners.on_view = lambda: asked_s.append(now_s())
    east.have(settled=False, s={0: at(3)})
    east.exchange.ask_soon(TOPIC, "west")
    await asyncio.sleep(50 * PERIOD_S)
    # Two segments are viewed for each question.
    pauses = [round((b - a) / PERIOD_S) for a, b in pairwise(asked_s[::2])]
    assert pauses[:6] == [1, 2, 4, 8, 8, 8]
    count = len(asked_s)
    await asyncio.sleep(2 * PERIOD_S)
    assert len(asked_s) == count
    east.exchange.ask_soon(TOPIC, "west")
    await asyncio.sleep(PERIOD_S)
    assert len(asked_s) == count + 2
    await east.exchange.stop()


async def test_what_a_cluster_answers_without_being_asked_is_dropped(east: East) -> None:
    east.have(settled=False, s={0: at(3)})
    east.west.answer = SubscriptionsLeft(
        THERE,
        {"s": {0: at(7), 1: at(8), 99: at(1)}, "other": {0: at(7)}},
        frozenset({"s", "other"}),
    )
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: bool(east.owners.answers))
    shown = await east.exchange.view(TOPIC)
    assert shown == {"west": {"answeredMs": 1234, "notReplicated": ["s"], "late": []}}
    assert east.owners.answers == [
        (0, CopiesAnswered("west", at(9), {"s": at(3)}, {"s": at(7)}, THERE)),
    ]


async def test_nothing_is_asked_of_a_topic_that_was_deleted(east: East) -> None:
    east.is_there = False
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: east.reads == 1)
    await east.is_quiet()


async def test_many_subscriptions_are_told_in_several_questions(
    east: East, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SUBSCRIPTION_POSITIONS", 4)
    names = [f"s{number}" for number in range(5)]
    east.have(settled=False, **{name: {0: at(1), 1: at(2)} for name in names})
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: len(east.west.questions) > 2)
    assert [[*each.below] for each in east.west.questions[:3]] == [names[:2], names[2:4], names[4:]]


TOLD = PositionsTold("west", 5, 3, frozenset({0}), {"s": {0: at(4)}})


async def test_the_first_copy_left_in_any_segment_is_answered(east: East) -> None:
    east.owners.left = {
        0: CopiesLeft(terminated=False, first={"s": {0: at(7)}}),
        1: CopiesLeft(terminated=False, first={"s": {0: at(6)}}),
    }
    assert await east.exchange.answer(TOPIC, TOLD) == SubscriptionsLeft(HERE, {"s": {0: at(6)}})
    assert east.owners.told == [(0, TOLD), (1, TOLD)]


async def test_nothing_is_answered_while_an_active_segment_of_the_layout_has_ended(
    east: East,
) -> None:
    east.owners.left = {
        0: CopiesLeft(terminated=True, first={"s": {0: at(7)}}),
        1: CopiesLeft(terminated=False, first={"s": {0: at(6)}}),
    }
    assert await east.exchange.answer(TOPIC, TOLD) == SubscriptionsLeft(HERE, {})


async def test_the_question_is_refused_when_an_owner_does_not_answer(east: East) -> None:
    east.owners.left = {
        0: ServiceNotReady("It moves."),
        1: CopiesLeft(terminated=False, first={"s": {0: at(6)}}),
    }
    with pytest.raises(ServiceNotReady, match="It moves"):
        await east.exchange.answer(TOPIC, TOLD)


async def test_a_subscription_is_made_where_it_is_missing_and_counts_then(east: East) -> None:
    east.owners.left = {
        0: CopiesLeft(terminated=False, first={}, missing=frozenset({"s"})),
        1: CopiesLeft(terminated=False, first={"s": {0: at(6)}}),
    }
    assert await east.exchange.answer(TOPIC, TOLD) == SubscriptionsLeft(HERE, {"s": {0: at(4)}})
    assert east.owners.made == [(0, "s")]
    assert east.owners.told == [(0, TOLD), (1, TOLD)] * 2


LATE = CopiesLeft(
    terminated=False,
    first={"s": {0: at(4)}, "t": {0: at(4)}},
    late=frozenset({"s", "t"}),
    from_start=frozenset({"s", "t"}),
)
TOLD_OF_TWO = replace(TOLD, below={"s": {0: at(4)}, "t": {0: at(4)}})


async def test_a_subscription_that_began_at_the_start_of_each_segment_is_noted_as_complete(
    east: East,
) -> None:
    east.owners.left = {0: LATE, 1: replace(LATE, from_start=frozenset({"s"}))}
    left = await east.exchange.answer(TOPIC, TOLD_OF_TWO)
    assert left == SubscriptionsLeft(HERE, LATE.first, late=frozenset({"t"}))
    assert east.owners.complete == [(0, "west", ["s"]), (1, "west", ["s"])]


async def test_no_subscription_is_complete_by_its_start_once_a_segment_was_pruned(
    east: East,
) -> None:
    east.layout = replace(east.layout, next_segment_id=3)
    east.owners.left = {0: LATE, 1: LATE}
    left = await east.exchange.answer(TOPIC, TOLD_OF_TWO)
    assert left == SubscriptionsLeft(HERE, LATE.first, late=LATE.late)
    assert not east.owners.complete


async def test_a_subscription_that_a_segment_lacks_is_not_complete_by_its_start(
    east: East,
) -> None:
    missing = CopiesLeft(
        terminated=False, first={"t": {0: at(4)}}, missing=frozenset({"s"}), late=frozenset({"t"})
    )
    east.owners.left = {0: LATE, 1: missing}
    await east.exchange.answer(TOPIC, TOLD_OF_TWO)
    assert not east.owners.complete


async def test_subscriptions_that_were_made_for_a_cluster_are_named_if_all_of_their_segments_were(
    east: East,
) -> None:
    positions = {0: at(3), 1: at(4)}
    east.have(settled=False, s=positions, t=positions)
    for segment_id, names in ((0, {"s", "t"}), (1, {"s"})):
        found = cast("SubscriptionState", east.owners.states[segment_id])
        east.owners.states[segment_id] = replace(found, made_for=frozenset(names))
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: bool(east.west.questions))
    assert east.west.questions[0].made_for == {"s"}


async def test_owners_hear_which_subscriptions_are_late_in_the_other_cluster(east: East) -> None:
    east.have(settled=False, s={0: at(3)}, t={0: at(3)})
    east.west.answer = SubscriptionsLeft(
        THERE, {"s": {0: at(3)}, "t": {0: at(7)}}, late=frozenset({"s", "u"})
    )
    east.exchange.ask_soon(TOPIC, "west")
    await until(lambda: bool(east.owners.answers))
    ((_, answered), *_) = east.owners.answers
    assert answered.late == {"s"}
    assert (await east.exchange.view(TOPIC))["west"]["late"] == ["s"]  # type: ignore[index]


async def test_a_subscription_that_cannot_be_made_holds_up_no_other(east: East) -> None:
    names = ["refused", "pulsar.repl.west", "missing", "there"]
    left = CopiesLeft(terminated=False, first={"there": {0: at(7)}}, missing=frozenset(names[:3]))
    east.owners.left = {0: left, 1: left}
    east.owners.refused = {"refused"}
    told = replace(TOLD, below={each: {0: at(4)} for each in names})
    with capture_logs() as logs:
        answer = await east.exchange.answer(TOPIC, told)
    # The others count as soon as they are made.
    assert answer.first == {"there": {0: at(7)}, "missing": {0: at(4)}}
    assert east.owners.made == [(0, "missing"), (1, "missing")]
    assert [(each["event"], each["count"]) for each in logs] == [
        ("replicated_subscriptions_not_made", 2)
    ] * 2


async def test_a_subscription_that_is_not_replicated_here_is_left_alone(east: East) -> None:
    east.owners.left = {
        0: CopiesLeft(terminated=False, first={}, missing=frozenset({"s"})),
        1: CopiesLeft(terminated=False, first={}),
    }
    left = await east.exchange.answer(TOPIC, TOLD)
    assert left == SubscriptionsLeft(HERE, {}, frozenset({"s"}))
    assert not east.owners.made


async def test_it_stops_while_a_question_is_under_way(
    east: East, monkeypatch: pytest.MonkeyPatch
) -> None:
    east.have(settled=False, s={0: at(3), 1: at(4)})
    asked = asyncio.Event()

    async def never(*_: object, **__: object) -> SubscriptionsLeft:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(east.west, "tell_positions", never)
    east.exchange.ask_soon(TOPIC, "west")
    await asked.wait()
    await east.exchange.stop()
    assert not east.exchange.status(TOPIC)


async def test_an_owner_that_still_has_something_to_ask_as_the_broker_stops_is_let_be(
    east: East,
) -> None:
    await east.exchange.stop()
    east.exchange.ask_soon(TOPIC, "west")
    assert not east.exchange.status(TOPIC)
