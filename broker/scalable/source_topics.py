"""`ScalableSourceTopics`: what the senders of segments to other clusters know of their topics."""

from collections.abc import Awaitable, Callable

from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import segment_of
from broker.scalable.replicated_segments import sending
from broker.scalable.segment_requests import ViewSegment
from broker.scalable.segments import Segments
from broker.topics.source_topics import SourceTopic
from broker.topics.topic import TopicNotFound
from magnetar.protocol.names import SegmentName, TopicName


class ScalableSourceTopics:
    """See `SourceTopics`."""

    def __init__(
        self,
        segments: Segments,
        read: Callable[[TopicName], Awaitable[LiveTopic]],
        renew: Callable[[TopicName, int | None], Awaitable[int]],
        on_incarnation: Callable[[Callable[[LiveTopic], None]], None],
    ) -> None:
        """`read` returns a topic with a record that is as new as any change that was answered.

        `renew` draws another incarnation for a topic, unless it has another one than that already.
        """
        self._segments = segments
        self._read = read
        self._renew = renew
        self._on_incarnation = on_incarnation

    def on_incarnation(self, listener: Callable[[TopicName, int | None], None]) -> None:
        """See `SourceTopics`."""
        self._on_incarnation(lambda live: listener(live.name, live.stored.record.incarnation))

    async def read(self, segment: SegmentName) -> SourceTopic:
        """See `SourceTopics`."""
        live = await self._topic_of(segment)
        incarnation = await self.incarnation_of(live)
        layout = live.layout
        return SourceTopic(
            incarnation,
            layout.epoch,
            frozenset(layout.segments),
            layout.ancestors(segment.segment_id),
            len(layout.active),
        )

    async def incarnation_of(self, live: LiveTopic) -> int:
        """The number of a topic, which is drawn if it has none."""
        # Not drawn with the topic: most are never replicated.
        if (incarnation := live.stored.record.incarnation) is None:
            incarnation = await self._renew(live.name, None)
        return incarnation

    async def may_send(self, segment: SegmentName, cursor: str, drained: set[int]) -> bool:
        """See `SourceTopics`."""
        live = await self._topic_of(segment)
        layout = live.layout
        # The oldest first: those after it are not drained before it either.
        for ancestor in sorted(layout.ancestors(segment.segment_id) - drained):
            found = layout.segments[ancestor]
            if found.legacy_topic_name is not None:
                # It was not replicated when it became a segment, and has no cursor.
                drained.add(ancestor)
                continue
            name = segment_of(live.name, found)
            view = await self._segments.ask(ViewSegment(name))
            if not (view.sealed and view.replicator_cursors.get(cursor, False)):
                break
            drained.add(ancestor)
        return segment.segment_id in sending(layout, drained)

    async def renew_incarnation(self, segment: SegmentName, incarnation: int) -> None:
        """See `SourceTopics`."""
        await self._renew((await self._topic_of(segment)).name, incarnation)

    async def _topic_of(self, segment: SegmentName) -> LiveTopic:
        live = await self._read(segment.parent)
        found = live.layout.segments.get(segment.segment_id)
        if found is None or segment_of(live.name, found) != segment:
            raise TopicNotFound(
                f"{segment} is no segment of {segment.parent}: look the topic up again."
            )
        return live
