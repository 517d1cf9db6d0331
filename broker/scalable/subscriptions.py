"""Subscriptions of a whole scalable topic, as operators see them: one on each of its segments.

Rules:

- Creating gives every ACTIVE segment the subscription; those that are sealed already are read by
  consumers that ask for them.  A subscription's type is fixed when it is first known.
- Deleting, seeking and skipping reach every segment that has the subscription, sealed ones too; a
  segment pruned meanwhile does not matter.
"""

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
    ViewSegment,
)
from broker.scalable.segments import Segments
from broker.scalable.topic_store import TopicStore
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.topic import SubscriptionNotFound, TopicNotFound
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import SegmentName, TopicName


class TopicSubscriptions:
    """Creates, deletes, resets and counts a subscription on all segments of a scalable topic."""

    def __init__(
        self, topics: LiveTopics, store: TopicStore, segments: Segments, controllers: Controllers
    ) -> None:
        self._topics = topics
        self._store = store
        self._segments = segments
        self._controllers = controllers

    async def create(
        self, name: TopicName, subscription: str, kind: SubscriptionKind, start: Position
    ) -> None:
        """Make the subscription where it is missing."""
        live = await self._topics.get(name)
        async with self._topics.lock(live.name):
            await self._store.put_subscription(live.name, subscription, kind)
            for segment in live.layout.active:
                name_of_one = segment_of(live.name, segment)
                await self._segments.ask(CreateSubscription(name_of_one, subscription, start))

    async def delete(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Remove it everywhere.  Raises `SubscriptionNotFound`, `ConsumerBusy` unless `force`."""
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
            controller = self._controllers.of(live.name)
            if controller is not None:
                controller.drop(subscription)
            await self._each(live, subscription, unsubscribe, may_be_missing=known)
            for consumer in await self._store.consumers(live.name, subscription):
                await self._store.remove_consumer(live.name, subscription, consumer)
            await self._store.remove_subscription(live.name, subscription)

    async def seek(self, name: TopicName, subscription: str, timestamp_ms: int) -> None:
        """Go on with the first message published at or after a time, in each segment."""
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
        """Go on with what is published from now on."""
        live = await self._topics.get(name)

        async def skip(segment: Segment, name: SegmentName) -> None:
            await self._segments.ask(SeekSubscription(name, subscription, LATEST))

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
                continue
        if not reached:
            raise SubscriptionNotFound(
                f"{live.name} has no subscription {subscription!r}: see its list over REST."
            )
