"""`RemoteSessions`: what the sender of one segment has attached at one other cluster."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

import structlog

from broker.replication.remote_segment import RemoteSegmentProducer, SessionOwner
from broker.replication.remote_topic import RemoteTopic, TopicFollower
from broker.replication.segment_plan import RemoteLayout
from broker.topics.replicated_ranges import SourceSegment
from magnetar.background_tasks import BackgroundTasks
from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection

log = structlog.get_logger(__name__)


class SessionsOwner(SessionOwner, TopicFollower):
    """Follows the topic there, and sends in sessions with its segments."""


class RemoteSessions:
    """Follows the topic at the other cluster, and has a session with each segment that needs one.

    While nothing is to be sent it has neither: see `leave`.
    """

    def __init__(self, context: ClientContext, cluster: str) -> None:
        self.topic: RemoteTopic | None = None
        """The topic there; None while it is not followed."""
        self.producers: dict[int, RemoteSegmentProducer] = {}
        """The producers by their segment there; some are not attached."""
        self._context = context
        self._cluster = cluster
        self._source: SourceSegment | None = None
        self._tasks = BackgroundTasks(log, failure_event="segment_replicator_failed")

    # Statistics

    @property
    def is_following(self) -> bool:
        """Whether the layout there is told as it changes."""
        return self.topic is not None and self.topic.state is AttachmentState.ATTACHED

    @property
    def connection(self) -> Connection | None:
        """One of its connections; None without any."""
        attached = (self.topic, *self.producers.values())
        found = (each.connection for each in reversed(attached) if each is not None)
        return next((each for each in found if each is not None), None)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest part without answer was sent, by the loop's time; None without any."""
        sent_s = (each.oldest_s for each in self.producers.values())
        return min((each for each in sent_s if each is not None), default=None)

    @property
    def attached_ms(self) -> int:
        """When the newest session began."""
        return max((each.attached_ms for each in self.producers.values()), default=0)

    # Attaching

    def follow(self, topic: str, source: SourceSegment, owner: SessionsOwner) -> None:
        """Follow the topic there."""
        self._source = source
        self.topic = RemoteTopic(self._context, topic, self._cluster, owner)
        self._tasks.start(_open(self.topic), "remote_topic")

    def begin(self, layout: RemoteLayout, ids: Collection[int], owner: SessionOwner) -> None:
        """Begin sessions with these segments of a layout, unless that was done."""
        topic, source = self.topic, self._source
        if topic is None or source is None:
            return
        for segment in layout.segments:
            if segment.segment_id in ids and segment.segment_id not in self.producers:
                producer = RemoteSegmentProducer(
                    self._context,
                    topic.layout.segments[segment.segment_id].topic,
                    self._cluster,
                    source,
                    segment,
                    owner,
                )
                self.producers[segment.segment_id] = producer
                self._tasks.start(_open(producer), "remote_segment")

    def keep(self, ids: Collection[int]) -> None:
        """End the sessions with all other segments; the owner is told nothing more of them."""
        for segment_id in self.producers.keys() - ids:
            producer = self.producers.pop(segment_id)
            producer.leave_owner()
            self._tasks.start(producer.close(), "remote_segment_closed")

    def leave(self) -> None:
        """End all sessions, and follow the topic there no more."""
        self.keep(())
        topic, self.topic = self.topic, None
        if topic is not None:
            self._tasks.start(topic.close(), "remote_topic_closed")

    async def close(self) -> None:
        """Leave, and return when that is done; bounded in time."""
        self.leave()
        if running := self._tasks.running:
            await asyncio.wait(running)


async def _open(attachment: Attachment) -> None:
    """Attach for the first time, unless it is closed meanwhile."""
    with suppress(AlreadyClosed):
        await attachment.open(None)
