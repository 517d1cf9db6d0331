"""Carries out requests about segments that this broker owns."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import ClassVar, Protocol

import structlog

from broker.scalable.counters import ScalableCounters
from broker.scalable.host import ScalableHost
from broker.scalable.key_sample import KeySample
from broker.scalable.key_sampling import sample_keys
from broker.scalable.offloading import offload_manifest
from broker.scalable.segment_stats import stats_of
from broker.scalable.segment_view import Members, SegmentView, SubscriptionView, is_drained
from broker.scalable.send_pause import PausedSends
from broker.topics.carried_ids import FinalSequences
from broker.topics.completeness import INCOMPLETE, Completeness
from broker.topics.consumer import Consumer
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.producer import Producer
from broker.topics.replicated_ranges import EVERYTHING
from broker.topics.replication import is_replicator_cursor
from broker.topics.subscription import Subscription
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionState,
)
from broker.topics.topic import (
    LIST_SUBSCRIPTIONS,
    SubscriptionNotFound,
    Topic,
    TopicNotFound,
    TopicState,
)
from broker.topics.truncation import move_behind
from magnetar.protocol.ids import Position
from magnetar.protocol.names import SegmentName, TopicName
from magnetar.protocol.server_error import InternalError, PeerError, ServerError
from storage.managed_ledger.types import ManagedLedgerNotFound

log = structlog.get_logger(__name__)


class SealInterrupted(InternalError):
    """A segment was closed before it was sealed."""


class SegmentNamed(PeerError):
    """A segment of a topic, or one that a step makes, cannot be deleted by itself."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class Followers(Protocol):
    """The followers of segments that are loaded here; see `broker.scalable.feed`."""

    def seen(self, segment: SegmentName, topic: Topic) -> None:
        """Report a segment whose view was asked for."""
        ...

    def sealed(self, segment: SegmentName, topic: Topic) -> None:
        """Report that a segment was sealed."""
        ...


class LocalSegments:
    """Carries out requests about segments that this broker owns.

    `is_named` returns whether the topic's record names a segment, or a noted step of another
    attempt than the given one makes it.  It reads both anew.  `find_topic` takes a scalable topic
    into memory, if there is one.
    """

    def __init__(
        self,
        broker: ScalableHost,
        followers: Followers,
        is_named: Callable[[SegmentName, str], Awaitable[bool]],
        find_topic: Callable[[TopicName], Awaitable[object]],
        counters: ScalableCounters,
    ) -> None:
        self._broker = broker
        self._followers = followers
        self._is_named = is_named
        self._find_topic = find_topic
        self._counters = counters
        self.paused_sends = PausedSends(self.producers)

    async def open(self, segment: SegmentName) -> Topic:
        """Return the topic of a segment, loaded if need be.  Raises `TopicNotFound`."""
        legacy = segment.legacy_topic is not None
        if legacy:
            # Its events are those of a segment only while the scalable topic is in memory here.
            await self._find_topic(segment.parent)
        return await self._broker.topics.get(segment.topic_name, create=not legacy)

    def running(self, segment: SegmentName) -> Topic | None:
        """Return the topic of a segment that is loaded."""
        return self._broker.topics.loaded().get(str(segment))

    def producers(self, segment: SegmentName) -> Collection[Producer]:
        """The producers of a segment that is loaded."""
        topic = self.running(segment)
        return () if topic is None else topic.producers.values()

    async def view(self, segment: SegmentName) -> SegmentView:
        """Return the current state, and report it to followers.  Raises `TopicNotFound`."""
        topic = await self.open(segment)
        self._followers.seen(segment, topic)
        return view_of(topic)

    async def view_of_running(self, segment: SegmentName) -> SegmentView | None:
        """Return the current state, None if the segment is not loaded."""
        topic = self.running(segment)
        return None if topic is None else view_of(topic)

    async def sample_keys(self, segment: SegmentName) -> KeySample | None:
        """Return a sample of the newest entries' keys, None if the segment is not loaded."""
        topic = self.running(segment)
        return None if topic is None else await sample_keys(topic, self._broker.clock.now_ms())

    async def create_subscription(
        self,
        segment: SegmentName,
        name: str,
        start: Position,
        properties: Mapping[str, str],
        *,
        replicated: bool = False,
        completeness: Completeness = INCOMPLETE,
    ) -> None:
        """Create a durable subscription, or the cursor of a replicator, unless it exists."""
        topic = await self.open(segment)
        if is_replicator_cursor(name):
            await topic.open_replicator_cursor(name, start)
            # The list of clusters may have changed since the parent was asked.
            topic.replication.apply()
            return
        await topic.create_subscription(
            name, start, properties=properties, replicated=replicated, completeness=completeness
        )

    async def delete_subscription(self, segment: SegmentName, name: str, *, force: bool) -> None:
        """Delete a subscription.  Raises `SubscriptionNotFound`, `ConsumerBusy` unless forced."""
        await (await self.open(segment)).unsubscribe(name, force=force)

    async def set_replicated(self, segment: SegmentName, name: str, *, replicated: bool) -> None:
        """Have a subscription move in other clusters too, or not.

        Raises `SubscriptionNotFound`.
        """
        topic = await self.open(segment)
        await topic.set_replicated(_subscription(topic, name), replicated=replicated)

    async def seek(self, segment: SegmentName, name: str, position: Position) -> None:
        """Move a subscription to EARLIEST or LATEST.  Raises `SubscriptionNotFound`."""
        await _subscription(await self.open(segment), name).seek(position)

    async def skip_backlog(self, segment: SegmentName, name: str) -> None:
        """Move a subscription behind the messages that may be read now.

        Raises `SubscriptionNotFound`.
        """
        topic = await self.open(segment)
        await move_behind(topic, _subscription(topic, name), topic.max_read_position())

    async def seek_to_time(self, segment: SegmentName, name: str, timestamp_ms: int) -> None:
        """Move a subscription to the first message published at or after a time."""
        topic = await self.open(segment)
        position = await first_published_since(topic.ledger, timestamp_ms)
        await _subscription(topic, name).seek(position)

    async def subscription_state(self, segment: SegmentName, cluster: str) -> SubscriptionState:
        """Return how far the replicated subscriptions have come, for another cluster."""
        positions = (await self.open(segment)).replication.positions
        if positions is None:
            return SubscriptionState(None, {}, settled=True)
        return await positions.state(cluster)

    async def take_positions(self, segment: SegmentName, told: PositionsTold) -> CopiesLeft:
        """Acknowledge copies that are acknowledged in their source cluster.

        Returns what is left of them.  Raises `StaleSender`.
        """
        topic = await self.open(segment)
        positions = topic.replication.positions
        return no_copies(topic, told) if positions is None else await positions.take_positions(told)

    async def note_complete(self, segment: SegmentName, cluster: str, names: Sequence[str]) -> None:
        """Note durably of which subscriptions nothing of another cluster is missing."""
        positions = (await self.open(segment)).replication.positions
        if positions is not None:
            await positions.note_complete(cluster, names)

    async def take_answer(self, segment: SegmentName, answered: CopiesAnswered) -> None:
        """Acknowledge what another cluster has no copy of any more that is not acknowledged."""
        positions = (await self.open(segment)).replication.positions
        if positions is not None:
            await positions.take_answer(answered)

    async def seal(self, segment: SegmentName) -> None:
        """Refuse new producers, let attached ones finish, terminate the segment."""
        topic = await self.open(segment)
        if topic.sealed:
            return
        begin_seal(topic)
        try:
            await topic.seal(wait_for_producers=True)
            self._counters.segments_sealed += 1
            self._followers.sealed(segment, topic)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # This call was not cancelled: the topic was unloaded while producers finished.
            raise SealInterrupted(
                f"{segment} was unloaded while it was being sealed: seal it again."
            ) from None

    async def final_sequences(self, segment: SegmentName, changed_ms: int) -> FinalSequences:
        """Return the last sequence ids and ranges of a sealed segment, its parents' included."""
        topic = await self.open(segment)
        return await topic.final_sequences(segment, changed_ms)

    async def inherit_sequences(self, segment: SegmentName, finals: FinalSequences) -> None:
        """Give a segment the last sequence ids and ranges of its parents, durably.

        It takes them once.
        """
        topic = await self.open(segment)
        await topic.sequence_store.inherit(segment, finals)

    async def delete(self, segment: SegmentName, attempt: str) -> None:
        """Delete a segment that is in no layout, with its producers and consumers closed.

        `attempt` is that of the step which is undone, empty if none is.

        Raises `SegmentNamed`: another broker may be making the segment meanwhile, or may have put
        it into the layout, so notes and record are read twice, before clients are closed and once
        the ledger is opened here.
        """

        async def require_unnamed() -> None:
            # Another leader notes its step before it opens the child's ledger.  So if its note is
            # not there yet once the ledger is open here, it opens the ledger later, which fences
            # this deletion; and if its note is gone already, the record names the child.
            if await self._is_named(segment, attempt):
                raise SegmentNamed(
                    f"{segment} is a segment of {segment.parent}, or is being made one: delete the "
                    "topic, or let it be pruned."
                )

        await require_unnamed()
        try:
            await self._broker.topics.delete(
                segment.topic_name, force=True, require_unused=require_unnamed
            )
        except (TopicNotFound, ManagedLedgerNotFound):
            log.debug("segment_already_deleted", segment=str(segment))

    async def stats(self, segment: SegmentName) -> Members:
        """Return the statistics of a segment."""
        return await stats_of(await self.open(segment))

    async def offload(self, segment: SegmentName, url: str | None) -> None:
        """Offload ended ledgers.  Raises `OffloadNotConfigured`, `InvalidOffloadUrl`."""
        await self._broker.offloads.offload(await self.open(segment), url=url)

    async def offload_manifest(self, segment: SegmentName) -> Members:
        """Return the state of offloading, and each ledger with its copy."""
        topic = await self.open(segment)
        return await offload_manifest(topic, self._broker.offloads.outcome(topic))

    async def drop_hot(self, segment: SegmentName, ledger_ids: Sequence[int] | None) -> list[int]:
        """Delete these ledgers, or all, that are copied as a whole; return their ids."""
        return await self._broker.offloads.drop_hot(await self.open(segment), ledger_ids)


def view_of(topic: Topic) -> SegmentView:
    """Return the view of a loaded segment."""
    return SegmentView(
        sealed=topic.sealed,
        entries=topic.ledger.entry_count,
        producers=sum(producer.attached for producer in topic.producers.values()),
        subscriptions={
            name: SubscriptionView(
                durable=each.durable,
                backlog=each.backlog,
                at_end=each.at_end,
                consumers=len(each.consumers),
                properties=each.cursor.properties,
                replicated=each.cursor.replicated,
                completeness=Completeness.parse(each.cursor.replication_note),
            )
            for name, each in topic.subscriptions.items()
        },
        replicator_cursors={name: each.at_end for name, each in topic.replicator_cursors.items()},
    )


def no_copies(topic: Topic, told: PositionsTold) -> CopiesLeft:
    """The answer of a legacy topic: nothing that a segment of another cluster sent is in it."""
    found = {name: topic.subscriptions.get(name) for name in told.below}
    return CopiesLeft(
        topic.sealed,
        {
            name: dict.fromkeys(told.below[name], EVERYTHING.position)
            for name, each in found.items()
            if each is not None and each.cursor.replicated
        },
        frozenset(name for name, each in found.items() if each is None or not each.durable),
    )


def consumers_of(topic: Topic) -> list[tuple[str, Consumer]]:
    """Return all attached consumers, each with the name of its subscription."""
    return [
        (name, consumer)
        for name, subscription in topic.subscriptions.items()
        for consumer in subscription.consumers
    ]


def drained(topic: Topic, subscription: str) -> bool:
    """Return whether a subscription has drained a topic for good."""
    found = topic.subscriptions.get(subscription)
    return is_drained(
        sealed=topic.sealed,
        empty=topic.ledger.entry_count == 0,
        at_end=None if found is None else topic.sealed and found.at_end,
    )


def begin_seal(topic: Topic) -> None:
    """Refuse new producers, unless the topic does so already or is being closed."""
    if topic.state is TopicState.OPEN:
        topic.begin_seal()


def _subscription(topic: Topic, name: str) -> Subscription:
    found = topic.subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(
            f"{topic.name} has no subscription {name!r}: {LIST_SUBSCRIPTIONS}"
        )
    return found
