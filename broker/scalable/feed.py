"""The feed: events of segments that are loaded here, for the brokers that lead their topics.

A leader follows a topic with FollowTopic over its channel, and gets events of the kind FEED_EVENT.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar
from weakref import WeakValueDictionary

from broker.placement.typed_request import EventSink, Request, RequestHandler, request_handlers
from broker.scalable.host import ScalableHost
from broker.scalable.mirror import FeedMessage, segment_message
from broker.scalable.segment_view import Members
from broker.topics.consumer import Consumer
from broker.topics.topic import Topic
from magnetar.protocol.names import SegmentName, TopicName

FEED_EVENT = "segment.feed"
"""Kind of the events; each is a message of `FeedMessage`."""


class Follower:
    """A broker that follows topics here, over one connection."""

    def __init__(self, feeds: "SegmentFeeds", sink: EventSink) -> None:
        self.topics: set[TopicName] = set()
        self.connected = True
        self._feeds = feeds
        self._sink = sink

    def follow(self, topic: TopicName) -> None:
        """See `FollowTopic`."""
        if self.connected:
            self._feeds.follow(self, topic)

    def unfollow(self, topic: TopicName) -> None:
        """See `UnfollowTopic`."""
        self._feeds.unfollow(self, topic)

    def send(self, message: Members) -> None:
        """Send an event after those that wait already."""
        self._sink.send_event(FEED_EVENT, message)


@dataclass(frozen=True, slots=True)
class FeedRequest(Request[Follower, None]):
    """A request of a leader about the events of one topic."""

    topic: TopicName


@dataclass(frozen=True, slots=True)
class FollowTopic(FeedRequest):
    """Send a snapshot of the topic's loaded segments, and then each event, in order.

    A topic that is followed already gets a new snapshot.
    """

    KIND: ClassVar[str] = "segment.follow-topic"

    async def run(self, follower: Follower) -> None:
        """See `SegmentFeeds.follow`."""
        follower.follow(self.topic)


@dataclass(frozen=True, slots=True)
class UnfollowTopic(FeedRequest):
    """Send no more events of the topic."""

    KIND: ClassVar[str] = "segment.unfollow-topic"

    async def run(self, follower: Follower) -> None:
        """See `SegmentFeeds.unfollow`."""
        follower.unfollow(self.topic)


FEED_REQUESTS: Mapping[str, type[FeedRequest]] = MappingProxyType(
    {each.KIND: each for each in (FollowTopic, UnfollowTopic)}
)


class _FollowedTopic:
    """The followers of one topic, and the segments and consumers that they know."""

    def __init__(self) -> None:
        self.followers: dict[Follower, None] = {}
        self.announced: WeakValueDictionary[int, Topic] = WeakValueDictionary()
        self.ids: dict[object, str] = {}


class SegmentFeeds:
    """Sends events of the segments that are loaded here to the followers of their topics.

    Without followers of its topic an event costs one look-up in a table.
    """

    def __init__(
        self, broker: ScalableHost, segment_of: Callable[[TopicName], SegmentName | None]
    ) -> None:
        """`segment_of` returns the segment that a topic of a name is, if it is one."""
        self._broker = broker
        self._segment_of = segment_of
        self._process = f"{broker.random.getrandbits(64):016x}"
        self._last_id = 0
        self._topics: dict[TopicName, _FollowedTopic] = {}
        self._followers: dict[EventSink, Follower] = {}

    # Followers

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each of FEED_REQUESTS, for the channels of other brokers."""

        async def carry_out(sink: EventSink, request: FeedRequest) -> None:
            await request.run(self.follower_of(sink))

        return request_handlers(FEED_REQUESTS, carry_out)

    def follower_of(self, sink: EventSink) -> Follower:
        """Return the follower at the other end of a connection."""
        follower = self._followers.get(sink)
        if follower is None:
            follower = self._followers[sink] = Follower(self, sink)
            sink.on_close(partial(self._disconnect, sink))
        return follower

    def follow(self, follower: Follower, topic: TopicName) -> None:
        """Send a follower a snapshot of a topic, and its events from now on."""
        followed = self._topics.setdefault(topic, _FollowedTopic())
        running = self._running(topic)
        for segment, loaded in running.items():
            self._announce(followed, segment, loaded)
        followed.followers[follower] = None
        follower.topics.add(topic)
        segments = [
            self._message_of(followed, segment.segment_id, loaded)
            for segment, loaded in running.items()
        ]
        follower.send(
            {"topic": str(topic), "kind": FeedMessage.SNAPSHOT.value, "segments": segments}
        )

    def unfollow(self, follower: Follower, topic: TopicName) -> None:
        """Send a follower no more events of a topic.  It may follow it no longer."""
        follower.topics.discard(topic)
        followed = self._topics.get(topic)
        if followed is not None:
            followed.followers.pop(follower, None)
            if not followed.followers:
                del self._topics[topic]

    def stop(self) -> None:
        """Send no more events."""
        for sink in list(self._followers):
            self._disconnect(sink)

    def _disconnect(self, sink: EventSink) -> None:
        follower = self._followers.pop(sink, None)
        if follower is not None:
            follower.connected = False
            for topic in list(follower.topics):
                self.unfollow(follower, topic)

    def _running(self, topic: TopicName) -> dict[SegmentName, Topic]:
        found: dict[SegmentName, Topic] = {}
        for running in self._broker.topics.loaded().values():
            if not running.name.local_name.startswith(topic.local_name):
                continue  # neither a segment of it, nor a topic or partition that became one
            segment = self._segment_of(running.name)
            # A segment that closes is in no snapshot: its next owner may report it already.
            if segment is not None and segment.parent == topic and not running.closing:
                found[segment] = running
        return found

    def _message_of(self, followed: _FollowedTopic, segment_id: int, topic: Topic) -> Members:
        return segment_message(segment_id, topic, lambda consumer: self._id_of(followed, consumer))

    def _id_of(self, followed: _FollowedTopic, consumer: object) -> str:
        # With the number of the process, so that no other process gives the same id: a follower
        # that comes back can tell which consumers it knows.
        known = followed.ids.get(consumer)
        if known is None:
            self._last_id += 1
            known = followed.ids[consumer] = f"{self._process}-{self._last_id}"
        return known

    # Events

    def attached(
        self, segment: SegmentName, topic: Topic, subscription: str, consumer: Consumer
    ) -> None:
        """Report that a consumer was attached."""
        followed = self._topics.get(segment.parent)
        if followed is not None and not self._announce(followed, segment, topic):
            known = self._id_of(followed, consumer)
            members: Members = {"id": known, "subscription": subscription, "name": consumer.name}
            self._send(followed, segment, FeedMessage.ATTACHED, members)

    def detached(self, segment: SegmentName, consumer: Consumer, *, by_command: bool) -> None:
        """Report that a consumer is gone."""
        followed = self._topics.get(segment.parent)
        if followed is None:
            return
        known = followed.ids.pop(consumer, None)
        if known is not None:
            members: Members = {"id": known, "byCommand": by_command}
            self._send(followed, segment, FeedMessage.DETACHED, members)

    def at_end(self, segment: SegmentName, topic: Topic, subscription: str) -> None:
        """Report that a subscription has drained a sealed segment, or was set back on it."""
        followed = self._topics.get(segment.parent)
        if followed is not None and not self._announce(followed, segment, topic):
            found = topic.subscriptions.get(subscription)
            is_so = found is not None and found.at_end
            members: Members = {"subscription": subscription, "is": is_so}
            self._send(followed, segment, FeedMessage.AT_END, members)

    def seen(self, segment: SegmentName, topic: Topic) -> None:
        """Report a segment whose view was asked for, unless its followers know it."""
        followed = self._topics.get(segment.parent)
        if followed is not None:
            self._announce(followed, segment, topic)

    def sealed(self, segment: SegmentName, topic: Topic) -> None:
        """Report that a segment was sealed."""
        self._report_again(segment, topic)

    def sharing_changed(self, segment: SegmentName, topic: Topic) -> None:
        """Report that consumers should not share a segment any more."""
        self._report_again(segment, topic)

    def _report_again(self, segment: SegmentName, topic: Topic) -> None:
        followed = self._topics.get(segment.parent)
        if followed is not None:
            followed.announced.pop(segment.segment_id, None)
            self._announce(followed, segment, topic)

    def gone(self, segment: SegmentName, topic: Topic) -> None:
        """Report that a segment has been unloaded."""
        followed = self._topics.get(segment.parent)
        if followed is not None and followed.announced.get(segment.segment_id) is topic:
            del followed.announced[segment.segment_id]
            self._send(followed, segment, FeedMessage.GONE, {})

    def _announce(self, followed: _FollowedTopic, segment: SegmentName, topic: Topic) -> bool:
        """Report a segment as a whole if its followers do not know it; return whether it was so.

        The message stands for the event that made it necessary.
        """
        if followed.announced.get(segment.segment_id) is topic:
            return False
        followed.announced[segment.segment_id] = topic
        members = self._message_of(followed, segment.segment_id, topic)
        self._send(followed, segment, FeedMessage.SEGMENT, members)
        return True

    @staticmethod
    def _send(
        followed: _FollowedTopic, segment: SegmentName, kind: FeedMessage, members: Members
    ) -> None:
        message: Members = {
            "topic": str(segment.parent),
            "kind": kind.value,
            "segment": segment.segment_id,
            **members,
        }
        for follower in list(followed.followers):
            follower.send(message)
