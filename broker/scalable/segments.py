"""The running topics and stored ledgers behind the segments of scalable topics.

Rules:

- What is running is asked of the topic registry; only children that no layout names yet, and
  segments that none names any longer, are touched as bare ledgers.
- A subscription has drained a sealed segment when no transaction is open there and its backlog is
  0; one that does not exist there has nothing to drain only if the segment holds no entry at all.
- Only durable subscriptions are carried over; a reader brings its own position.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from broker.topic import Topic, TopicNotFound
from protocol.ids import EARLIEST
from protocol.names import SegmentName
from storage.managed_ledger_types import ManagedLedgerNotFound

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.service import Broker

log = structlog.get_logger(__name__)


class Segments:
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker

    # Running

    async def open(self, segment: SegmentName) -> Topic:
        """The segment's topic, loaded if need be.  Raises `TopicNotFound`."""
        return await self._broker.topics.get(segment.topic_name, create=True)

    def running(self, segment: SegmentName) -> Topic | None:
        """The segment's topic, if it is loaded."""
        return self._broker.topics.loaded().get(str(segment))

    def in_use(self, segments: Iterable[SegmentName]) -> SegmentName | None:
        """The first of them that a producer or consumer is attached to."""
        for segment in segments:
            topic = self.running(segment)
            if topic is None:
                continue
            if consumers_of(topic) or any(each.attached for each in topic.producers.values()):
                return segment
        return None

    async def is_drained(self, segment: SegmentName, subscription: str) -> bool:
        """Whether a subscription has nothing more to get from a sealed segment."""
        return drained(await self.open(segment), subscription)

    # Reshaping

    async def prepare(
        self, child: SegmentName, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Make a segment that no layout names yet, with these subscriptions at Earliest."""
        await self._broker.topics.make_way(child.topic_name)
        ledger = await self._broker.managed_ledgers.open(child.ledger_path)
        for name, properties in subscriptions.items():
            if name not in ledger.cursors:
                await ledger.open_cursor(name, EARLIEST, properties=properties)

    async def carry_over(self, parent: SegmentName, children: Iterable[SegmentName]) -> None:
        """Give the parent's subscriptions to its children, at Earliest where they are missing."""
        names = list(durable_subscriptions(await self.open(parent)))
        for child in children:
            topic = await self.open(child)
            for name in names:
                await topic.create_subscription(name, EARLIEST)

    async def delete(self, segment: SegmentName) -> None:
        """Remove a segment that no layout names (any longer): everybody is sent away."""
        try:
            await self._broker.topics.delete(segment.topic_name, force=True)
        except (TopicNotFound, ManagedLedgerNotFound):
            log.debug("segment_gone_already", segment=str(segment))


def durable_subscriptions(topic: Topic) -> dict[str, Mapping[str, str]]:
    """The subscriptions of a topic that outlive their consumers, with their properties."""
    return {
        name: subscription.cursor.properties
        for name, subscription in topic.subscriptions.items()
        if subscription.durable
    }


def consumers_of(topic: Topic) -> "list[tuple[str, Consumer]]":
    """Everybody who is attached, with the name of the subscription."""
    return [
        (name, consumer)
        for name, subscription in topic.subscriptions.items()
        for consumer in subscription.consumers
    ]


def drained(topic: Topic, subscription: str) -> bool:
    """Whether a subscription has nothing more to get from a topic, now and for ever."""
    if not topic.sealed:
        return False
    found = topic.subscriptions.get(subscription)
    if found is None:
        return topic.ledger.entry_count == 0
    return found.at_end
