"""Subscriptions of a whole scalable topic, for operators: one on each of its segments."""

from collections.abc import Awaitable, Callable

from broker.scalable.controllers import Controllers
from broker.scalable.layout import Segment
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.records import SubscriptionKind, segment_of
from broker.scalable.segment_requests import (
    CreateSubscription,
    DeleteSubscription,
    SeekSubscription,
    SeekSubscriptionToTime,
    SetReplicated,
    SkipSegmentBacklog,
    ViewSegment,
)
from broker.scalable.segments import Segments
from broker.scalable.topic_store import TopicStore
from broker.topics.client_connection import ClientConnection
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.topic import LIST_SUBSCRIPTIONS, SubscriptionNotFound, TopicNotFound
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import SegmentName, TopicName


class TopicSubscriptions:
    """Creates, deletes and resets a subscription on all segments of a scalable topic.

    Deleting, seeking and skipping reach all segments that have the subscription, sealed ones too.
    """

    def __init__(
        self, topics: LiveTopics, store: TopicStore, segments: Segments, controllers: Controllers
    ) -> None:
        self._topics = topics
        self._store = store
        self._segments = segments
        self._controllers = controllers

    async def create(
        self,
        name: TopicName,
        subscription: str,
        kind: SubscriptionKind,
        start: Position,
        *,
        replicated: bool,
    ) -> None:
        """Create a subscription on every ACTIVE segment where it is missing.

        `replicated`: it moves in other clusters too, where it is made.
        A subscription that has a type already keeps it.  On sealed segments consumers create it
        when they subscribe.  Raises `ReservedSubscription`.
        """
        require_of_clients(subscription)
        live = await self._topics.get(name)
        async with self._topics.lock(live.name):
            await self._store.put_subscription(live.name, subscription, kind)
            for segment in live.layout.active:
                target = segment_of(live.name, segment)
                await self._segments.ask(
                    CreateSubscription(target, subscription, start, replicated=replicated)
                )

    async def delete(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Delete a subscription on all segments, with its registered consumers.

        Those that are connected are sent away, as their segment consumers are: if they come back
        the subscription is made again.

        Raises `SubscriptionNotFound`; without `force` also `ConsumerBusy`.
        """
        live = await self._topics.get(name)

        async def require_unused(segment: Segment, name: SegmentName) -> None:
            found = (await self._segments.ask(ViewSegment(name))).subscriptions.get(subscription)
            if found is not None and found.consumers and not force:
                raise ConsumerBusy(
                    f"Subscription {subscription!r} has consumers on {name}: close them, or "
                    "delete it with force=true."
                )

        async def unsubscribe(segment: Segment, name: SegmentName) -> None:
            await self._segments.ask(DeleteSubscription(name, subscription, force))

        async with self._topics.lock(live.name):
            known = await self._store.subscription(live.name, subscription) is not None
            await self._each(live, subscription, require_unused, may_be_missing=known)
            gone = await self._drop(live, subscription)
            try:
                await self._each(live, subscription, unsubscribe, may_be_missing=known)
                for consumer in await self._store.consumers(live.name, subscription):
                    await self._store.remove_consumer(live.name, subscription, consumer)
                await self._store.remove_subscription(live.name, subscription)
            finally:
                # Some may have registered again before the records were removed.
                gone += await self._drop(live, subscription)
                for connection in dict.fromkeys(gone):
                    connection.close(f"subscription {subscription!r} of {live.name} was deleted")

    async def _drop(self, live: LiveTopic, subscription: str) -> list[ClientConnection]:
        """Forget a subscription's ordered consumers; returns their connections."""
        controller = self._controllers.of(live.name)
        return [] if controller is None else await controller.drop(subscription)

    async def replicated(self, name: TopicName, subscription: str) -> dict[str, bool]:
        """Whether the subscription moves in other clusters too, by the name of the segment.

        Raises `SubscriptionNotFound`.
        """
        live = await self._topics.get(name)
        found: dict[str, bool] = {}

        async def note(segment: Segment, name: SegmentName) -> None:
            view = (await self._segments.ask(ViewSegment(name))).subscriptions.get(subscription)
            if view is not None:
                found[str(name.topic_name)] = view.replicated

        await self._each(live, subscription, note)
        return found

    async def set_replicated(self, name: TopicName, subscription: str, *, replicated: bool) -> None:
        """Have the subscription move in other clusters too, or not, on each segment that has it.

        Raises `SubscriptionNotFound`.
        """
        live = await self._topics.get(name)

        async def change(segment: Segment, name: SegmentName) -> None:
            await self._segments.ask(SetReplicated(name, subscription, replicated))

        async with self._topics.lock(live.name):
            await self._each(live, subscription, change)

    async def seek(self, name: TopicName, subscription: str, timestamp_ms: int) -> None:
        """Seek to the first message published at or after a time, on each segment.

        Raises `SubscriptionNotFound`.
        """
        live = await self._topics.get(name)

        async def seek(segment: Segment, name: SegmentName) -> None:
            if not segment.active and segment.sealed_at_ms < timestamp_ms:
                await self._segments.ask(SeekSubscription(name, subscription, LATEST))
            elif segment.created_at_ms > timestamp_ms:
                await self._segments.ask(SeekSubscription(name, subscription, EARLIEST))
            else:
                await self._segments.ask(SeekSubscriptionToTime(name, subscription, timestamp_ms))

        await self._each(live, subscription, seek)

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        """Skip all messages that are published.  Raises `SubscriptionNotFound`."""
        live = await self._topics.get(name)

        async def skip(segment: Segment, name: SegmentName) -> None:
            await self._segments.ask(SkipSegmentBacklog(name, subscription))

        await self._each(live, subscription, skip)

    async def _each(
        self,
        live: LiveTopic,
        subscription: str,
        change: Callable[[Segment, SegmentName], Awaitable[None]],
        *,
        may_be_missing: bool = False,
    ) -> None:
        reached = may_be_missing
        for segment in list(live.layout.segments.values()):
            name = segment_of(live.name, segment)
            try:
                if subscription in (await self._segments.ask(ViewSegment(name))).subscriptions:
                    await change(segment, name)
                    reached = True
            except (TopicNotFound, SubscriptionNotFound):
                continue  # the segment was pruned meanwhile, or the subscription deleted
        if not reached:
            raise SubscriptionNotFound(
                f"{live.name} has no subscription {subscription!r}: create it with PUT "
                f".../subscriptions/NAME, or {LIST_SUBSCRIPTIONS}"
            )
