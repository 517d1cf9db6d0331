"""A stream subscription that begins while there are sealed segments loses nothing below them.

A new subscription gets a sealed segment first and the segments below it only when that one is
drained.  What is published to those meanwhile belongs to it, so its place there is held.

Rules:

- The controller does not know whether the user begins at the earliest or the latest message.  It
  holds the places at Latest, before the client hears of its registration; the latest then is what
  the user means by it.
- The client shows what it wants when it subscribes to the sealed segment: a subscription made at
  Latest has no backlog there, one made at Earliest has all of it (a sealed segment without any
  entry holds nobody up).  In that case the held places move to Earliest.
"""

import structlog

from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import segment_of
from broker.scalable.segment_requests import CreateSubscription, SeekSubscription, ViewSegment
from broker.scalable.segments import Segments
from magnetar.protocol.ids import EARLIEST, LATEST

log = structlog.get_logger(__name__)


class HeldPlaces:
    """Reserves a new stream subscription's place on active segments until sealed ones are drained.

    One for each new subscription.
    """

    def __init__(self, live: LiveTopic, subscription: str, segments: Segments) -> None:
        self._live = live
        self._subscription = subscription
        self._segments = segments
        self._origins: set[int] = set()

    async def hold(self) -> None:
        """Make the subscription on everything that it has to wait for."""
        layout = self._live.layout
        for segment in layout.sealed:
            view = await self._segments.ask(ViewSegment(segment_of(self._live.name, segment)))
            missing = self._subscription not in view.subscriptions
            if missing and not view.drained(self._subscription):
                self._origins.add(segment.segment_id)
        for segment_id in self._below(self._origins) - self._origins:
            name = segment_of(self._live.name, layout.segments[segment_id])
            await self._segments.ask(CreateSubscription(name, self._subscription, LATEST))

    @property
    def decided(self) -> bool:
        """Whether there is nothing left to find out."""
        return not self._origins

    def awaits(self, segment_id: int) -> bool:
        """Whether the first consumer on a segment will show what the user wants."""
        return segment_id in self._origins

    async def decide(self, segment_id: int) -> None:
        """The subscription was made on a segment: held places below it follow its start."""
        self._origins.discard(segment_id)
        segment = self._live.layout.segments.get(segment_id)
        if segment is None:
            return
        view = await self._segments.ask(ViewSegment(segment_of(self._live.name, segment)))
        subscription = view.subscriptions.get(self._subscription)
        if subscription is None or subscription.backlog == 0:
            return
        for below in sorted(self._below({segment_id})):
            name = segment_of(self._live.name, self._live.layout.segments[below])
            held = (await self._segments.ask(ViewSegment(name))).subscriptions.get(
                self._subscription
            )
            if held is not None and not held.consumers:
                await self._segments.ask(SeekSubscription(name, self._subscription, EARLIEST))
        log.debug("held_places_moved", topic=str(self._live.name), subscription=self._subscription)

    def _below(self, segment_ids: set[int]) -> set[int]:
        layout = self._live.layout
        return {s for origin in segment_ids for s in layout.descendants(origin)}
