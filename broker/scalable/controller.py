"""The controller of a topic: its ordered consumers, and the segments that each one has."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar

import structlog

from broker.scalable.counters import ScalableCounters
from broker.scalable.group_controller import GroupController
from broker.scalable.live_topics import LiveTopic, not_found
from broker.scalable.mirror import SegmentConsumer
from broker.scalable.records import SubscriptionKind, segment_of
from broker.scalable.reserved_subscriptions import ReservedSubscriptions
from broker.scalable.segments import Segments
from broker.scalable.topic_store import StoredSubscription, TopicStore
from broker.topics.client_connection import ClientConnection
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import segment_suffix
from magnetar.protocol.pulsar_pb2 import ScalableConsumerAssignment
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

log = structlog.get_logger(__name__)

_CONSUMER_KINDS = (SubscriptionKind.STREAM, SubscriptionKind.CHECKPOINT)


class WrongConsumerKind(PeerError):
    """The subscription serves consumers of another kind."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TopicController:
    """Assigns the segments of one scalable topic to its ordered consumers.

    There is one for each topic that has, or had, ordered consumers.  A registration is stored
    before it is answered, and removed when the consumer has left.  After a restart registered
    consumers count as disconnected, each with what it had and a whole grace period.  `grace_s`
    returns the length of grace periods that begin now.

    All consumers of a subscription are of one kind, that of the first: STREAM or CHECKPOINT.
    """

    def __init__(
        self,
        live: LiveTopic,
        store: TopicStore,
        segments: Segments,
        *,
        grace_s: Callable[[], float],
        counters: ScalableCounters,
    ) -> None:
        self.live = live
        self.groups: dict[str, GroupController] = {}
        self._known = frozenset(live.layout.segments)
        self._store = store
        self._segments = segments
        self._grace_s = grace_s
        self._counters = counters
        self._reserved: dict[str, ReservedSubscriptions] = {}
        self._deciding = BackgroundTasks(log)
        """The decisions where reserved subscriptions begin."""
        # Registrations are stored and removed one after the other: a consumer that comes back while
        # its leaving is stored ends up registered.
        self._registrations = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._closed_by: MagnetarError | None = None

    async def restore(self) -> None:
        """Read the stored registrations and assignments."""
        for subscription, kind in (await self._store.subscriptions(self.live.name)).items():
            if kind in _CONSUMER_KINDS:
                names = await self._store.consumers(self.live.name, subscription)
                if names:
                    stored = await self._store.subscription_record(self.live.name, subscription)
                    # Its first consumer may not have shown yet where it begins.
                    await self._reserve(subscription, kind)
                    await self._add_group(subscription, kind, names, stored)

    def connections(self) -> list[ClientConnection]:
        """The registered consumers' connections."""
        found = (each for group in self.groups.values() for each in group.connections())
        return list(dict.fromkeys(found))

    def send_away(self, why: MagnetarError) -> None:
        """Close the registered consumers' connections: another broker leads the topic now."""
        self._closed_by = why
        for group in self.groups.values():
            group.send_away(str(why))

    async def close(self) -> None:
        """End the controller: the topic is gone, or this broker no longer controls it."""
        self._closed_by = self._closed_by or not_found(self.live.name)
        async with self._registrations:
            pass
        groups = [*self.groups.values()]
        self.groups.clear()
        for group in groups:
            group.close()
        for group in groups:
            await group.stored()
        await self._tasks.end()
        await self._deciding.end()

    @property
    def idle(self) -> bool:
        """Whether the controller has no consumers and no unfinished work."""
        return (
            not (self._tasks.busy or self._deciding.busy)
            and not self._registrations.locked()
            and all(group.idle for group in self.groups.values())
            and all(reserved.decided for reserved in self._reserved.values())
        )

    # Consumers

    async def register(
        self,
        subscription: str,
        kind: SubscriptionKind,
        name: str,
        connection: ClientConnection,
        consumer_id: int,
    ) -> ScalableConsumerAssignment:
        """Register a consumer durably; return its assignment.

        Raises `WrongConsumerKind`, `MetadataError`, and after `send_away` or `close` the error that
        ended the controller.
        """
        async with self._registrations:
            self._require_open()
            group = self.groups.get(subscription) or await self._new_group(subscription, kind)
            if group.kind is not kind:
                raise WrongConsumerKind(
                    f"Subscription {subscription!r} of {self.live.name} has {group.kind.value} "
                    f"consumers: use another one for {kind.value}."
                )
            await self._store.put_consumer(self.live.name, subscription, name)
            # A controller that ended meanwhile would never send this consumer anything.
            self._require_open()
            return group.register(name, connection, consumer_id)

    def _require_open(self) -> None:
        if self._closed_by is not None:
            raise self._closed_by

    async def _new_group(self, subscription: str, kind: SubscriptionKind) -> GroupController:
        await self._store.put_subscription(self.live.name, subscription, kind)
        await self._reserve(subscription, kind)
        return await self._add_group(subscription, kind, [], None)

    async def _reserve(self, subscription: str, kind: SubscriptionKind) -> None:
        if kind is SubscriptionKind.STREAM and self.live.layout.sealed:
            reserved = ReservedSubscriptions(self.live, subscription, self._segments)
            await reserved.reserve()
            self._reserved[subscription] = reserved

    async def _add_group(
        self,
        subscription: str,
        kind: SubscriptionKind,
        names: list[str],
        stored: StoredSubscription | None,
    ) -> GroupController:
        group = GroupController(
            self.live,
            subscription,
            kind,
            store=self._store,
            stored=stored,
            grace_s=self._grace_s,
            changed=self._membership_changed,
            is_loaded=self._is_loaded,
            counters=self._counters,
        )
        if kind is SubscriptionKind.STREAM:
            for segment in self.live.layout.sealed:
                await self._segments.load(segment_of(self.live.name, segment))
        # A controller that ended meanwhile must not assign or remove anything: another one does.
        self._require_open()
        # Nothing is awaited from here to the end, so no event is missed.
        running = {
            segment: state
            for segment in self.live.layout.segments.values()
            if (state := self._segments.state(segment_of(self.live.name, segment))) is not None
        }
        gone = {s.segment_id for s, state in running.items() if state.drained(subscription)}
        group.begin(names, gone if kind is SubscriptionKind.STREAM else ())
        for segment, state in running.items():
            for used, consumer in state.consumers():
                if self._concerns(group, used, consumer, segment.segment_id):
                    group.replay(segment.segment_id, consumer)
        self.groups[subscription] = group
        group.start()
        if kind is SubscriptionKind.STREAM:
            group.mark_shareable({s.segment_id: state.shareable for s, state in running.items()})
        return group

    def _is_loaded(self, segment_id: int) -> bool:
        segment = self.live.layout.segments.get(segment_id)
        if segment is None:
            return False
        return self._segments.state(segment_of(self.live.name, segment)) is not None

    def _membership_changed(self, group: GroupController, name: str) -> None:
        self._in_background(partial(self._store_membership, group, name))

    async def _store_membership(self, group: GroupController, name: str) -> None:
        async with self._registrations:
            topic, subscription = self.live.name, group.subscription
            if group.is_registered(name):
                if self.groups.get(subscription) is group:
                    await self._store.put_consumer(topic, subscription, name)
                return
            await self._store.remove_consumer(topic, subscription, name)
            if group.kind is SubscriptionKind.CHECKPOINT and not group.group.sessions:
                await self._store.remove_subscription(topic, subscription)
                if self.groups.get(subscription) is group and not group.group.sessions:
                    self.groups.pop(subscription).close()

    async def settled(self) -> None:
        """Return when every registration that came or went so far is stored."""
        await asyncio.gather(*self._tasks.running, return_exceptions=True)

    async def drop(self, subscription: str) -> list[ClientConnection]:
        """Forget the consumers of a subscription that is deleted; returns their connections."""
        # A registration that is being stored has its consumer in the group afterwards.
        async with self._registrations:
            self._reserved.pop(subscription, None)
            group = self.groups.pop(subscription, None)
            if group is None:
                return []
            connections = group.connections()
            group.close()
            return connections

    # Events

    def layout_changed(self) -> None:
        """Assign the segments of a newer layout.

        New ones have no messages yet, so nothing hinders that consumers share them.
        """
        layout = self.live.layout
        made = [each for each in layout.active if each.segment_id not in self._known]
        self._known = frozenset(layout.segments)
        for group in self.groups.values():
            if group.kind is SubscriptionKind.STREAM:
                states = {s: self._segments.state(segment_of(self.live.name, s)) for s in made}
                group.mark_shareable(
                    {s.segment_id: state is None or state.shareable for s, state in states.items()}
                )
            group.layout_changed()

    def check_drained(self) -> None:
        """Check which groups have drained the sealed segments, after segments were sealed."""
        self._in_background(self._check_sealed)

    async def _check_sealed(self) -> None:
        for group in list(self.groups.values()):
            if group.kind is not SubscriptionKind.STREAM:
                continue
            for segment in self.live.layout.sealed:
                name = segment_of(self.live.name, segment)
                try:
                    await self._segments.load(name)
                except MagnetarError as error:
                    # Its next owner reports it once it is loaded; the others are checked now.
                    log.warning("segment_not_checked", segment=str(name), error=str(error))
                    continue
                self._check_segment(segment.segment_id, group)

    def backlog_changed(self, segment_id: int, subscription: str | None = None) -> None:
        """Check whether a subscription (None: each one) has drained a segment, and may share it.

        It has reached the segment's end, or was set back by a seek; or the segment got a batch
        without entry hashes.
        """
        for group in list(self.groups.values()):
            if subscription in (None, group.subscription) and group.kind is SubscriptionKind.STREAM:
                self._check_segment(segment_id, group)

    def _check_segment(self, segment_id: int, group: GroupController) -> None:
        """Take in whether a group has drained a segment, and may share it, if that is known."""
        segment = self.live.layout.segments.get(segment_id)
        if segment is not None:
            state = self._segments.state(segment_of(self.live.name, segment))
            if state is not None:
                group.mark_drained(segment_id, state.drained(group.subscription))
                group.mark_shareable({segment_id: state.shareable})

    def attached(self, segment_id: int, subscription: str, consumer: SegmentConsumer) -> None:
        """Take in that a consumer was attached to a segment."""
        for group in list(self.groups.values()):
            if self._concerns(group, subscription, consumer, segment_id):
                group.attached(segment_id, consumer)
                if group.kind is SubscriptionKind.STREAM:
                    self._check_segment(segment_id, group)
        reserved = self._reserved.get(subscription)
        if reserved is not None and reserved.shows(segment_id):
            decide = partial(reserved.decide, segment_id)
            self._deciding.see_through("reserved_subscriptions", decide)

    def detached(self, consumer: SegmentConsumer, *, by_command: bool, seen: bool = True) -> None:
        """Take in that a consumer is detached from a segment.

        `by_command`: it closed itself.  `seen` is False if it is not known how it was detached.
        """
        for group in list(self.groups.values()):
            group.detached(consumer, by_command=by_command, seen=seen)

    @staticmethod
    def _concerns(
        group: GroupController, subscription: str, consumer: SegmentConsumer, segment_id: int
    ) -> bool:
        if group.kind is SubscriptionKind.STREAM:
            return group.subscription == subscription
        # CHECKPOINT consumers read segments with subscriptions of their own, so the name of the
        # consumer alone tells whose they are.
        base = consumer.name.removesuffix(segment_suffix(segment_id))
        return base != consumer.name and group.speaks_at_segments(base)

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.start(self._logged(work))

    async def _logged(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except MagnetarError as error:
            log.warning("controller_work_failed", topic=str(self.live.name), error=str(error))
