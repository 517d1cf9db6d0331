"""`SubscriptionExchange`: what clusters tell each other of a scalable topic's subscriptions.

One broker asks for a topic: the one that leads it, or would be chosen to.  Nothing hangs on there
being only one (see `../../docs/decisions/replicated-subscriptions-of-segments.md`).
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeVar

import structlog

from broker.placement import Placement
from broker.placement.owner_requests import OwnedRequest, OwnerRequests
from broker.placement.typed_request import RequestHandler, request_handlers
from broker.scalable.layout import Layout
from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import segment_of
from broker.scalable.segment_requests import (
    CreateSubscription,
    NoteComplete,
    TakeAnswer,
    TakePositions,
    ViewSubscriptions,
)
from broker.scalable.segment_view import Members
from broker.scalable.segments import Segments
from broker.scalable.topic_store import ScalableTopicNotFound
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.completeness import Completeness
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    FirstCopy,
    OtherClusters,
    Positions,
    PositionsTold,
    SubscriptionsLeft,
    SubscriptionState,
    first_left,
    in_questions,
)
from broker.topics.topic_requests import OWNER_ERRORS
from config.bounds import (
    REPLICATION_RETRY_MAX_S,
    SEGMENTS_ASKED_AT_ONCE,
    SUBSCRIPTION_ANSWER_ROUNDS,
    SUBSCRIPTION_IDLE_PERIODS,
    SUBSCRIPTION_QUESTIONS_AT_ONCE,
)
from magnetar.background_tasks import BackgroundTasks, OwnerStopped
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.names import SegmentName, TopicName
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from txn.ack_records import for_each

A_co = TypeVar("A_co", covariant=True)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeRequest(OwnedRequest["SubscriptionExchange", A_co]):
    """A request to the broker that asks other clusters about a topic."""

    topic: TopicName

    @property
    def owned(self) -> TopicName:
        """See `OwnedRequest`."""
        return self.topic


@dataclass(frozen=True, slots=True)
class AskSoon(ExchangeRequest[None]):
    """Ask another cluster about the topic's subscriptions within a period."""

    KIND: ClassVar[str] = "topic.ask-soon"
    cluster: str

    async def run(self, exchange: "SubscriptionExchange") -> None:
        """See `SubscriptionExchange.begin`."""
        exchange.begin(self.topic, self.cluster)


@dataclass(frozen=True, slots=True)
class ViewExchange(ExchangeRequest[Members]):
    """Return how the questions about the topic go, by the other cluster."""

    KIND: ClassVar[str] = "topic.view-exchange"

    async def run(self, exchange: "SubscriptionExchange") -> Members:
        """See `SubscriptionExchange.status`."""
        return exchange.status(self.topic)


_REQUESTS: Mapping[str, type[ExchangeRequest[object]]] = MappingProxyType(
    {each.KIND: each for each in (AskSoon, ViewExchange)}
)


class _Outcome(enum.Enum):
    """What came of asking."""

    NOTHING_LEFT = "nothing left"
    """Owners have nothing to ask."""
    SAME = "same"
    """The answers are those of last time, to the same questions."""
    MOVED = "moved"


class _Asking:
    """The questions about one topic to one cluster."""

    def __init__(self) -> None:
        self.reminded = asyncio.Event()
        """Whether an owner has said, since all were asked last, that there is something to ask."""
        self.exchanged: list[tuple[Positions, SubscriptionsLeft]] = []
        """The questions of last time, and the answers."""
        self.known: Collection[int] = ()
        """The segments of which the cluster has acknowledged all that it was told, and no others:
        of those that were pruned it may have copies (F8)."""
        self.answered_ms: int | None = None
        self.error: MagnetarError | None = None

    @property
    def not_replicated(self) -> list[str]:
        """Subscriptions that are there without being replicated."""
        return sorted(name for _, each in self.exchanged for name in each.not_replicated)

    @property
    def late(self) -> list[str]:
        """Subscriptions that may lack messages there."""
        return sorted(name for _, each in self.exchanged for name in each.late)


class SubscriptionExchange:
    """Asks other clusters how far subscriptions have come there, and answers the same question.

    A topic of which no owner has anything to ask has no timer and no task.
    """

    def __init__(
        self,
        placement: Placement,
        segments: Segments,
        read: Callable[[TopicName], Awaitable[LiveTopic]],
        incarnation_of: Callable[[LiveTopic], Awaitable[int]],
        others: OtherClusters,
        local: str,
        clock: Clock,
        *,
        period_s: float,
    ) -> None:
        """`read` returns a topic with a record that is as new as any change that was answered.

        `local` is the name of this cluster.
        """
        self._placement = placement
        self._segments = segments
        self._read = read
        self._incarnation_of = incarnation_of
        self._others = others
        self._local = local
        self._clock = clock
        self._period_s = period_s
        self._leaders = OwnerRequests(placement, self, OWNER_ERRORS)
        self._asking: dict[tuple[TopicName, str], _Asking] = {}
        self._reminding: set[tuple[TopicName, str]] = set()
        self._slots = asyncio.Semaphore(SUBSCRIPTION_QUESTIONS_AT_ONCE)
        self._tasks = BackgroundTasks(log, failure_event="subscription_exchange_failed")
        self.questions = self.failures = 0
        """Questions that other clusters have answered, and attempts that failed."""

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each kind of request, for the channels of other brokers."""
        return request_handlers(_REQUESTS, lambda _, request: self._leaders.serve(request))

    async def stop(self) -> None:
        """Ask nothing more."""
        await self._tasks.stop()

    async def view(self, topic: TopicName) -> Members:
        """How the questions about a topic go, from the broker that asks them.

        A cluster is there while there is anything to ask.
        """
        return await self._leaders.ask(ViewExchange(topic))

    def status(self, topic: TopicName) -> Members:
        """The same of the questions of this broker, as JSON, by the other cluster.

        `answeredMs` is when it answered last, `failure` why it did not since then.  It says nothing
        of the subscriptions in `notReplicated`, which are not replicated there, nor of those in
        `late`, which were made there when messages were gone that they may have to consume.
        """
        return {
            cluster: {
                **({} if asking.answered_ms is None else {"answeredMs": asking.answered_ms}),
                **({} if asking.error is None else {"failure": str(asking.error)}),
                "notReplicated": asking.not_replicated,
                "late": asking.late,
            }
            for (name, cluster), asking in self._asking.items()
            if name == topic
        }

    # Asking

    def ask_soon(self, topic: TopicName, cluster: str) -> None:
        """Have the topic's leader ask a cluster: an owner here has something to ask or to tell."""
        key = (topic, cluster)
        if key in self._reminding:
            return
        # A broker that stops hands its segments over: their next owners come again.
        with suppress(OwnerStopped):
            self._reminding.add(key)
            self._tasks.start(self._remind(key), f"ask {cluster} of {topic}")

    async def _remind(self, key: tuple[TopicName, str]) -> None:
        try:
            await self._leaders.ask(AskSoon(*key))
        except MagnetarError as error:
            # The owner says it again, as long as it is so.
            log.debug("leader_not_reminded", topic=str(key[0]), error=str(error))
        finally:
            self._reminding.discard(key)

    def begin(self, topic: TopicName, cluster: str) -> None:
        """Ask a cluster once a period, until nothing is left to be asked.

        While its answer stays the same it is asked less often, in the end once in
        SUBSCRIPTION_IDLE_PERIODS of them, until an owner comes again.
        """
        key = (topic, cluster)
        asking = self._asking.get(key)
        if asking is None:
            self._asking[key] = asking = _Asking()
            self._tasks.start(self._keep_asking(key, asking), f"subscriptions of {topic}")
        asking.reminded.set()

    async def _keep_asking(self, key: tuple[TopicName, str], asking: _Asking) -> None:
        topic, cluster = key
        period_s = self._period_s
        same = Backoff(period_s, SUBSCRIPTION_IDLE_PERIODS * period_s)
        failed = Backoff(period_s, max(period_s, REPLICATION_RETRY_MAX_S))
        try:
            await asyncio.sleep(period_s)
            # The owners remind the broker that leads the topic, whichever it is.
            while self._placement.owner_of(topic).broker_id == self._placement.broker_id:
                asking.reminded.clear()
                try:
                    outcome = await self._ask(topic, cluster, asking)
                except ScalableTopicNotFound:
                    return
                except MagnetarError as error:
                    self._note_failure(key, asking, error)
                    await asyncio.sleep(failed.pause_s())
                    continue
                asking.error = None
                failed.reset()
                if outcome is _Outcome.NOTHING_LEFT and not asking.reminded.is_set():
                    return
                if outcome is not _Outcome.SAME or asking.reminded.is_set():
                    same.reset()
                await asyncio.sleep(period_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(same.pause_s() - period_s):
                        await asking.reminded.wait()
        finally:
            # Nothing is awaited since `reminded` was read: no reminder is lost.
            if self._asking.get(key) is asking:
                del self._asking[key]

    def _note_failure(
        self, key: tuple[TopicName, str], asking: _Asking, error: MagnetarError
    ) -> None:
        self.failures += 1
        if str(error) != str(asking.error):
            log.warning(
                "subscription_positions_not_told",
                topic=str(key[0]),
                cluster=key[1],
                error=str(error),
            )
        # The frames of the error would keep what they have.
        asking.error = error.with_traceback(None)

    async def _ask(self, topic: TopicName, cluster: str, asking: _Asking) -> _Outcome:
        """Ask once, and have owners take the answer."""
        live = await self._read(topic)
        layout = live.layout
        own = _own_segments(live.name, layout)
        states = await self._states(own, cluster)
        below = _to_tell(states)
        is_settled = states.keys() == own.keys() and all(each.settled for each in states.values())
        if is_settled and (asking.known == layout.segments.keys() or not below):
            return _Outcome.NOTHING_LEFT
        made_for = _made_for(states.values()) if states.keys() == own.keys() else frozenset()
        incarnation = await self._incarnation_of(live)
        before, asking.exchanged = asking.exchanged, []
        for part in in_questions(below):
            told = PositionsTold(
                self._local,
                incarnation,
                layout.epoch,
                frozenset(layout.segments),
                part,
                made_for & part.keys(),
            )
            answer = _asked_of(await self._others.tell_positions(cluster, live.name, told), part)
            self.questions += 1
            asking.answered_ms = self._clock.now_ms()
            asking.exchanged.append((part, answer))
            await self._take(cluster, own, states, part, answer)
        if all(_is_known(*each) for each in asking.exchanged):
            asking.known = layout.segments.keys()
        return _Outcome.SAME if asking.exchanged == before else _Outcome.MOVED

    async def _states(
        self, own: Mapping[int, SegmentName], cluster: str
    ) -> dict[int, SubscriptionState]:
        """What the owners say; one that does not answer is left out."""
        found: dict[int, SubscriptionState] = {}

        async def view(segment_id: int) -> None:
            try:
                found[segment_id] = await self._segments.ask(
                    ViewSubscriptions(own[segment_id], cluster)
                )
            except MagnetarError as error:
                # Nothing is told of it now.
                log.debug(
                    "subscriptions_not_viewed", segment=str(own[segment_id]), error=str(error)
                )

        await for_each(list(own), view, at_once=SEGMENTS_ASKED_AT_ONCE)
        return found

    async def _take(
        self,
        cluster: str,
        own: Mapping[int, SegmentName],
        states: Mapping[int, SubscriptionState],
        told: Positions,
        answer: SubscriptionsLeft,
    ) -> None:
        """Have the owners take what the cluster has answered to what it was told, and no more."""

        async def take(segment_id: int) -> None:
            left = {
                name: positions[segment_id]
                for name, positions in answer.first.items()
                if segment_id in positions
            }
            answered, began = states[segment_id].answered, states[segment_id].began
            if not left or answered is None:
                return
            below = {name: told[name][segment_id] for name in left}
            taken = CopiesAnswered(
                cluster, answered, below, left, answer.incarnation, answer.late, began
            )
            try:
                await self._segments.ask(TakeAnswer(own[segment_id], taken))
            except MagnetarError as error:
                # The next answer says it again.
                log.debug("subscriptions_not_moved", segment=str(own[segment_id]), error=str(error))

        await for_each(list(states), take, at_once=SEGMENTS_ASKED_AT_ONCE)

    # Answering

    async def answer(self, topic: TopicName, told: PositionsTold) -> SubscriptionsLeft:
        """Acknowledge what another cluster tells, and say what is left here.

        A subscription that is missing is made, replicated, at the first entries.  One that may lack
        some moves here, and says nothing of what it has consumed (F11).  Raises as the requests to
        the owners: then all that they have acknowledged stays so.
        """
        async with self._slots:
            # One that is missing is made, and may be complete then: so owners are told again.
            for _ in range(SUBSCRIPTION_ANSWER_ROUNDS):
                left, has_changed = await self._answer(topic, told)
                if not has_changed:
                    break
            return left

    async def _answer(
        self, topic: TopicName, told: PositionsTold
    ) -> tuple[SubscriptionsLeft, bool]:
        """The answer as it is now, and whether a subscription was made or is complete since."""
        live = await self._read(topic)
        layout = live.layout
        own = _own_segments(live.name, layout)
        answers: dict[int, CopiesLeft] = {}

        async def tell(segment_id: int) -> None:
            answers[segment_id] = await self._segments.ask(TakePositions(own[segment_id], told))

        await for_each(list(own), tell, at_once=SEGMENTS_ASKED_AT_ONCE)
        unreplicated = _unreplicated(answers.values(), told.below)
        missing = _missing(answers, told.below.keys() - unreplicated)
        has_changed = await self._make(topic, own, missing, told.cluster)
        late = frozenset(name for each in answers.values() for name in each.late)
        complete: frozenset[str] = frozenset()
        # No segment was pruned, and no entry dropped before they were made.
        if len(layout.segments) == layout.next_segment_id:
            complete = _begun_at_start(late, answers.values())
            await self._note_complete(own, complete, told.cluster)
        incarnation = await self._incarnation_of(live)
        first = _first_left(layout, own, answers, told.below)
        left = SubscriptionsLeft(incarnation, first, unreplicated, late)
        return left, has_changed or bool(complete)

    async def _note_complete(
        self, own: Mapping[int, SegmentName], names: Collection[str], cluster: str
    ) -> None:
        """Have owners note that these lack nothing of a cluster."""

        async def note(segment_id: int) -> None:
            await self._segments.ask(NoteComplete(own[segment_id], cluster, sorted(names)))

        if names:
            await for_each(list(own), note, at_once=SEGMENTS_ASKED_AT_ONCE)

    async def _make(
        self,
        topic: TopicName,
        own: Mapping[int, SegmentName],
        missing: Mapping[str, Collection[int]],
        cluster: str,
    ) -> bool:
        """Make subscriptions in these segments, for those of another cluster; whether one was made.

        They count once they are in all segments (F10).  One that cannot be made holds up no other.
        """
        failures: dict[str, MagnetarError] = {}
        made_for = Completeness(made_for=cluster)
        for name, segments in missing.items():

            async def make(segment_id: int, name: str = name) -> None:
                await self._segments.ask(
                    CreateSubscription(
                        own[segment_id], name, EARLIEST, replicated=True, completeness=made_for
                    )
                )

            try:
                require_of_clients(name)
                await for_each(list(segments), make, at_once=SEGMENTS_ASKED_AT_ONCE)
            except MagnetarError as error:
                failures[name] = error
        if failures:
            name, failure = next(iter(failures.items()))
            log.warning(
                "replicated_subscriptions_not_made",
                topic=str(topic),
                count=len(failures),
                subscription=name,
                error=str(failure),
            )
        return len(failures) < len(missing)


def _own_segments(topic: TopicName, layout: Layout) -> dict[int, SegmentName]:
    """The segments that may be replicated, by id: one that was an ordinary topic is not."""
    return {
        each.segment_id: segment_of(topic, each)
        for each in layout.segments.values()
        if each.legacy_topic_name is None
    }


def _to_tell(states: Mapping[int, SubscriptionState]) -> Positions:
    """How far the subscriptions have come in each segment that is replicated to the cluster."""
    below: dict[str, dict[int, Position]] = {}
    for segment_id, state in states.items():
        if state.answered is not None:
            for name, position in state.below.items():
                below.setdefault(name, {})[segment_id] = position
    return below


def _is_known(told: Positions, answer: SubscriptionsLeft) -> bool:
    """Whether a cluster has read its logs to the end, and has acknowledged all that it was told."""
    return all(
        answer.first.get(name, {}).get(segment_id, EARLIEST) >= position
        for name, positions in told.items()
        for segment_id, position in positions.items()
    )


def _first_left(
    layout: Layout,
    own: Collection[int],
    answers: Mapping[int, CopiesLeft],
    told: Positions,
) -> Positions:
    """The first copies that are left, from the answers of all segments (F4)."""
    active = [each.segment_id for each in layout.active]
    first: dict[str, dict[int, Position]] = {}
    for name, positions in told.items():
        for source in positions:
            copies = {
                segment_id: FirstCopy(found.first[name][source], found.terminated)
                for segment_id, found in answers.items()
                if source in found.first.get(name, {})
            }
            position = first_left(active, own, copies)
            if position is not None:
                first.setdefault(name, {})[source] = position
    return first


def _asked_of(answer: SubscriptionsLeft, told: Positions) -> SubscriptionsLeft:
    """The part of an answer that was asked for: another cluster may say more, of any size."""
    first = {
        name: {each: positions[each] for each in told[name] if each in positions}
        for name, positions in answer.first.items()
        if name in told
    }
    names = told.keys()
    return answer._replace(
        first=first,
        not_replicated=answer.not_replicated & names,
        late=answer.late & names,
    )


def _made_for(states: Collection[SubscriptionState]) -> frozenset[str]:
    """The subscriptions that were made here, in each segment, for those of the asked cluster."""
    names = frozenset(name for each in states for name in each.made_for)
    return frozenset(name for name in names if all(name in each.made_for for each in states))


def _begun_at_start(names: frozenset[str], answers: Collection[CopiesLeft]) -> frozenset[str]:
    """Those of these subscriptions that began at the first entry in each segment."""
    return names.intersection(*(each.from_start & each.first.keys() for each in answers))


def _missing(answers: Mapping[int, CopiesLeft], names: Collection[str]) -> dict[str, list[int]]:
    """The segments that lack each subscription, of those that any segment lacks."""
    return {
        name: lacking
        for name in names
        if (lacking := [each for each, found in answers.items() if name in found.missing])
    }


def _unreplicated(answers: Collection[CopiesLeft], names: Collection[str]) -> frozenset[str]:
    """The subscriptions that are in any segment without being replicated."""
    return frozenset(
        name
        for name in names
        if any(name not in each.first and name not in each.missing for each in answers)
    )
