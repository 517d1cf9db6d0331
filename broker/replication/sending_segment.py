"""`SendingSegment`: how one other cluster knows a segment that is sent to it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from broker.topics.replicated_ranges import SourceSegment
from broker.topics.segment_sources import SourceState
from broker.topics.source_topics import SourceTopics
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from config.bounds import REPLICATION_RETRY_MAX_S, REPLICATION_RETRY_MIN_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import segment_name


class SendingSegment:
    """A segment that is sent to one other cluster: the incarnation of its topic, and its epochs.

    Rules R2, R8 and R12 of `../../docs/decisions/replicated-segments.md`.
    """

    def __init__(
        self, topic: Topic, subscription: Subscription, local: str, topics: SourceTopics
    ) -> None:
        """`subscription` is the position of the sender; `local` is the name of this cluster."""
        self.name = segment_name(topic.name)
        self.source: SourceSegment | None = None
        """The name by which the other cluster knows it; None before it may send."""
        self._topic = topic
        self._subscription = subscription
        self._local = local
        self._topics = topics
        self._owner_epoch = 0
        self._ancestor_drained = asyncio.Event()

    async def begin(self, failed: Callable[[Exception], None]) -> SourceSegment:
        """Wait until all ancestors are drained for the other cluster (R2), and take the epochs.

        `failed` is called with each error, after which it is tried again.
        """
        backoff = Backoff(REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S)
        drained: set[int] = set()
        while True:
            self._ancestor_drained.clear()
            try:
                if await self._topics.may_send(self.name, self._subscription.name, drained):
                    incarnation = (await self._topics.read(self.name)).incarnation
                    self._owner_epoch = await self._topic.owner.take()
                    break
            except Exception as error:  # noqa: BLE001 - tried again, and shown
                failed(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.pause_s()):
                    await self._ancestor_drained.wait()
        self.source = SourceSegment(self._local, incarnation, self.name.segment_id)
        self._subscription.cursor.send_as(incarnation)
        return self.source

    def ancestor_drained(self) -> None:
        """Look again, in `begin`, whether all ancestors are drained."""
        self._ancestor_drained.set()

    async def state(self) -> SourceState | None:
        """The state that the other cluster gets when a session begins.

        None if the topic has another incarnation: begin anew.  Raises as `SourceTopics.read`,
        and as `Cursor.persist`.
        """
        cursor = self._subscription.cursor
        acknowledged = cursor.mark_delete
        # It counts as stored there for ever.  A successor has to know what of it was not sent.
        await cursor.persist()
        found, source = await self._topics.read(self.name), self.source
        if source is None or found.incarnation != source.incarnation:
            return None
        return SourceState(
            source,
            self._owner_epoch,
            found.layout_epoch,
            found.segments,
            found.ancestors,
            acknowledged,
        )

    async def is_newest(self, state: SourceState) -> bool:
        """Whether nothing newer than this is known here (R12).

        Raises if the segment has another owner.
        """
        found = await self._topics.read(self.name)
        if found.layout_epoch != state.layout_epoch:
            return False
        await self._topic.owner.confirm()
        return True

    async def renew_incarnation(self, incarnation: int) -> None:
        """See `SourceTopics`."""
        await self._topics.renew_incarnation(self.name, incarnation)

    async def active_segments(self) -> int:
        """The number of ACTIVE segments that the topic has here."""
        return (await self._topics.read(self.name)).active
