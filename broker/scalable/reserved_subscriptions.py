"""Subscriptions that are reserved below sealed segments for a new stream subscription."""

import structlog

from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import segment_of
from broker.scalable.segment_requests import CreateSubscription, SeekSubscription, ViewSegment
from broker.scalable.segments import Segments
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName

log = structlog.get_logger(__name__)


class ReservedSubscriptions:
    """Reserves a new stream subscription on the descendants of sealed segments.

    A new subscription reads a sealed segment first, and its descendants only when that one is
    drained.  Messages published to them meanwhile belong to the subscription too, so it is created
    there at once.

    The controller does not know whether the user begins at Earliest or Latest.  It reserves at
    Latest.  The client's own subscription on the sealed segment then shows which one is meant: it
    has a backlog if it began at Earliest, and then the reserved ones are set back to Earliest.

    There is one object for each new subscription.
    """

    def __init__(self, live: LiveTopic, subscription: str, segments: Segments) -> None:
        self._live = live
        self._subscription = subscription
        self._segments = segments
        self._origins: set[int] = set()
        self._shown: set[int] = set()
        """Those that had their first consumer."""
        self._earliest: dict[int, bool] = {}
        """Whether the user begins at Earliest, by sealed segments that showed it."""
        self._moved: set[int] = set()
        """Segments where the reserved subscription was set back."""

    async def reserve(self) -> None:
        """Create the subscription at Latest on all segments that it cannot read yet.

        It is called before the client gets its answer, so Latest is what the user means by it.
        """
        for segment in self._live.layout.sealed:
            view = await self._segments.ask(ViewSegment(segment_of(self._live.name, segment)))
            # A segment without entries counts as drained, and no consumer has to wait for it.
            missing = self._subscription not in view.subscriptions
            if missing and not view.drained(self._subscription):
                self._origins.add(segment.segment_id)
        for name in self._below(self._origins):
            if name.segment_id not in self._origins:
                await self._segments.ask(CreateSubscription(name, self._subscription, LATEST))

    @property
    def decided(self) -> bool:
        """Whether the start is known on all sealed segments; a pruned one does not count."""
        return self._origins.isdisjoint(self._live.layout.segments)

    def shows(self, segment_id: int) -> bool:
        """Whether a consumer on a segment is the first one, which shows the start that is meant."""
        if segment_id not in self._origins or segment_id in self._shown:
            return False
        self._shown.add(segment_id)
        return True

    async def decide(self, segment_id: int) -> None:
        """Set reserved subscriptions below a segment to Earliest if the client began there so.

        If it raises, it is to be called again, and goes on where it was.
        """
        if segment_id not in self._live.layout.segments:
            self._origins.discard(segment_id)
            return
        if segment_id not in self._earliest:
            self._earliest[segment_id] = await self._begins_at_earliest(segment_id)
        if self._earliest[segment_id]:
            for name in self._below({segment_id}):
                if name.segment_id not in self._moved:
                    await self._set_to_earliest(name)
                    self._moved.add(name.segment_id)
            log.debug(
                "reserved_subscriptions_set_to_earliest",
                topic=str(self._live.name),
                subscription=self._subscription,
            )
        self._origins.discard(segment_id)

    async def _begins_at_earliest(self, segment_id: int) -> bool:
        segment = self._live.layout.segments[segment_id]
        view = await self._segments.ask(ViewSegment(segment_of(self._live.name, segment)))
        subscription = view.subscriptions.get(self._subscription)
        return subscription is not None and subscription.backlog > 0

    async def _set_to_earliest(self, name: SegmentName) -> None:
        view = await self._segments.ask(ViewSegment(name))
        reserved = view.subscriptions.get(self._subscription)
        if reserved is not None and not reserved.consumers:
            await self._segments.ask(SeekSubscription(name, self._subscription, EARLIEST))

    def _below(self, segment_ids: set[int]) -> list[SegmentName]:
        """The segments below these in the layout of now, which changes while others are asked."""
        layout = self._live.layout
        there = segment_ids & layout.segments.keys()
        below = {each for origin in there for each in layout.descendants(origin)}
        return [segment_of(self._live.name, layout.segments[each]) for each in sorted(below)]
