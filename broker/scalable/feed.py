"""What this broker tells others of segments that run here, for topics that they lead.

Rules:

- A follower is told everything once when it begins to follow a topic, and each event after that, in
  order.  A segment of which it has not heard yet is told as a whole, instead of its first event.
- A segment that closes is told as gone when it has closed, and is in no snapshot before: its next
  owner may be telling of it already.
- Consumers have ids that no other process gives: a follower that comes back can compare.
- What waits for a follower is bounded; one that is too slow is cut off, comes back, and is told
  everything anew.
- While nobody follows a topic its events cost one look at a table.
"""

import asyncio
import json
from weakref import WeakValueDictionary

import structlog

from broker.scalable.host import ScalableHost
from broker.scalable.mirror import FeedMessage, segment_message
from broker.scalable.segment_view import Members
from broker.topics.consumer import Consumer
from broker.topics.topic import Topic
from config.bounds import FEED_MESSAGES_WAITING
from magnetar.protocol.names import (
    SegmentName,
    TopicDomain,
    TopicName,
    parse_topic_name,
    segment_name,
)
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

FEED_PATH = "/admin/v2/segment-feed"
"""A WebSocket by which a broker follows topics here."""


class Follower:
    """One broker that follows topics.  Its connection takes what waits with `next_batch`."""

    def __init__(self) -> None:
        self.topics: set[TopicName] = set()
        self.cut_off = False
        self._waiting: list[Members] = []
        self._wake = asyncio.Event()

    def tell(self, message: Members) -> None:
        """Say it after what waits already."""
        if len(self._waiting) >= FEED_MESSAGES_WAITING:
            self.close()
        if not self.cut_off:
            self._waiting.append(message)
            self._wake.set()

    async def next_batch(self) -> str | None:
        """What waits, as one JSON array; None once it is cut off."""
        await self._wake.wait()
        if self.cut_off:
            return None
        self._wake.clear()
        batch, self._waiting = self._waiting, []
        return json.dumps(batch, separators=(",", ":"))

    def close(self) -> None:
        """Tell it nothing more."""
        self.cut_off = True
        self._waiting.clear()
        self._wake.set()


class _Followed:
    """One topic that somebody follows."""

    def __init__(self) -> None:
        self.followers: dict[Follower, None] = {}
        self.announced: WeakValueDictionary[int, Topic] = WeakValueDictionary()
        self.ids: dict[object, str] = {}


class SegmentFeeds:
    """Sends events of the segments that run here to the brokers that lead their topics."""

    def __init__(self, broker: ScalableHost) -> None:
        self._broker = broker
        self._process = f"{broker.random.getrandbits(64):016x}"
        self._last_id = 0
        self._topics: dict[TopicName, _Followed] = {}
        self._followers: dict[Follower, None] = {}

    # Followers

    def connect(self) -> Follower:
        """Somebody begins to follow; nothing yet."""
        follower = Follower()
        self._followers[follower] = None
        return follower

    def disconnect(self, follower: Follower) -> None:
        """It is gone."""
        follower.close()
        self._followers.pop(follower, None)
        for topic in list(follower.topics):
            self._unfollow(follower, topic)

    def hear(self, follower: Follower, text: str) -> None:
        """What a follower says: `{"follow": topic}` or `{"unfollow": topic}`."""
        try:
            said = json.loads(text)
            if "follow" in said:
                self._follow(follower, parse_topic_name(str(said["follow"])))
            else:
                self._unfollow(follower, parse_topic_name(str(said["unfollow"])))
        except (ValueError, KeyError, TypeError, MagnetarError) as error:
            log.warning("follower_not_understood", said=text[:200], error=repr(error))
            follower.close()

    def stop(self) -> None:
        """Tell nobody anything more."""
        for follower in list(self._followers):
            self.disconnect(follower)

    def _follow(self, follower: Follower, topic: TopicName) -> None:
        followed = self._topics.setdefault(topic, _Followed())
        running = self._running(topic)
        for segment, loaded in running.items():
            self._announce(followed, segment, loaded)
        followed.followers[follower] = None
        follower.topics.add(topic)
        segments = [
            self._everything(followed, segment.segment_id, loaded)
            for segment, loaded in running.items()
        ]
        follower.tell(
            {"topic": str(topic), "kind": FeedMessage.SNAPSHOT.value, "segments": segments}
        )

    def _unfollow(self, follower: Follower, topic: TopicName) -> None:
        follower.topics.discard(topic)
        followed = self._topics.get(topic)
        if followed is not None:
            followed.followers.pop(follower, None)
            if not followed.followers:
                del self._topics[topic]

    def _running(self, topic: TopicName) -> dict[SegmentName, Topic]:
        found: dict[SegmentName, Topic] = {}
        for running in self._broker.topics.loaded().values():
            if running.name.domain is TopicDomain.SEGMENT:
                segment = segment_name(running.name)
                if segment.parent == topic and not running.closing:
                    found[segment] = running
        return found

    def _everything(self, followed: _Followed, segment_id: int, topic: Topic) -> Members:
        return segment_message(segment_id, topic, lambda consumer: self._id_of(followed, consumer))

    def _id_of(self, followed: _Followed, consumer: object) -> str:
        known = followed.ids.get(consumer)
        if known is None:
            self._last_id += 1
            known = followed.ids[consumer] = f"{self._process}-{self._last_id}"
        return known

    # Events

    def attached(
        self, segment: SegmentName, topic: Topic, subscription: str, consumer: Consumer
    ) -> None:
        """A consumer was attached."""
        followed = self._topics.get(segment.parent)
        if followed is not None and not self._announce(followed, segment, topic):
            known = self._id_of(followed, consumer)
            members: Members = {"id": known, "subscription": subscription, "name": consumer.name}
            self._tell(followed, segment, FeedMessage.ATTACHED, members)

    def detached(self, segment: SegmentName, consumer: Consumer, *, by_command: bool) -> None:
        """It is gone."""
        followed = self._topics.get(segment.parent)
        if followed is None:
            return
        known = followed.ids.pop(consumer, None)
        if known is not None:
            members: Members = {"id": known, "byCommand": by_command}
            self._tell(followed, segment, FeedMessage.DETACHED, members)

    def at_end(self, segment: SegmentName, topic: Topic, subscription: str) -> None:
        """A subscription has drained a sealed segment, or was set back on it."""
        followed = self._topics.get(segment.parent)
        if followed is not None and not self._announce(followed, segment, topic):
            found = topic.subscriptions.get(subscription)
            is_so = found is not None and found.at_end
            members: Members = {"subscription": subscription, "is": is_so}
            self._tell(followed, segment, FeedMessage.AT_END, members)

    def seen(self, segment: SegmentName, topic: Topic) -> None:
        """The leader looked at a segment: it must have heard of it."""
        followed = self._topics.get(segment.parent)
        if followed is not None:
            self._announce(followed, segment, topic)

    def sealed(self, segment: SegmentName, topic: Topic) -> None:
        """It was sealed."""
        followed = self._topics.get(segment.parent)
        if followed is not None:
            followed.announced.pop(segment.segment_id, None)
            self._announce(followed, segment, topic)

    def gone(self, segment: SegmentName, topic: Topic) -> None:
        """It is not loaded here any more."""
        followed = self._topics.get(segment.parent)
        if followed is not None and followed.announced.get(segment.segment_id) is topic:
            del followed.announced[segment.segment_id]
            self._tell(followed, segment, FeedMessage.GONE, {})

    def _announce(self, followed: _Followed, segment: SegmentName, topic: Topic) -> bool:
        """Tell everything of a segment that nobody has heard of; whether that was necessary."""
        if followed.announced.get(segment.segment_id) is topic:
            return False
        followed.announced[segment.segment_id] = topic
        members = self._everything(followed, segment.segment_id, topic)
        self._tell(followed, segment, FeedMessage.SEGMENT, members)
        return True

    @staticmethod
    def _tell(
        followed: _Followed, segment: SegmentName, kind: FeedMessage, members: Members
    ) -> None:
        message: Members = {
            "topic": str(segment.parent),
            "kind": kind.value,
            "segment": segment.segment_id,
            **members,
        }
        for follower in list(followed.followers):
            follower.tell(message)
