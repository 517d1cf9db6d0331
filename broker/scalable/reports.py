"""Events of segments, on their way to the topic's controller and to other brokers."""

from broker.scalable.controllers import Controllers
from broker.scalable.feed import SegmentFeeds
from broker.scalable.live_topics import LiveTopics
from broker.scalable.mirror import RemoteConsumer
from broker.topics.consumer import Consumer
from broker.topics.topic import Topic
from magnetar.protocol.names import SegmentName, TopicName


class SegmentReports:
    """Passes events of segments on to the topic's controller here and to followers elsewhere.

    It implements `TopicEvents` and `FeedListener`.  A controller gets the same calls for segments
    that run here and at other brokers.
    """

    controllers: Controllers
    feeds: SegmentFeeds
    _topics: LiveTopics

    # Segments that run here

    def consumer_attached(self, topic: Topic, subscription: str, consumer: Consumer) -> None:
        """See `TopicEvents`."""
        segment = self.segment_of(topic)
        if segment is None:
            return
        self.feeds.attached(segment, topic, subscription, consumer)
        controller = self.controllers.of(segment.parent)
        if controller is not None:
            controller.attached(segment.segment_id, subscription, consumer)

    def consumer_closed(
        self, topic: Topic, subscription: str, consumer: Consumer, *, by_command: bool
    ) -> None:
        """See `TopicEvents`."""
        segment = self.segment_of(topic)
        if segment is None:
            return
        self.feeds.detached(segment, consumer, by_command=by_command)
        controller = self.controllers.of(segment.parent)
        if controller is not None:
            controller.detached(consumer, by_command=by_command)

    def subscription_drained(self, topic: Topic, subscription: str) -> None:
        """See `TopicEvents`."""
        self._backlog_changed(topic, subscription)

    def subscription_rewound(self, topic: Topic, subscription: str) -> None:
        """See `TopicEvents`."""
        self._backlog_changed(topic, subscription)

    def unstamped_batch_found(self, topic: Topic) -> None:
        """See `TopicEvents`."""
        segment = self.segment_of(topic)
        if segment is None:
            return
        self.feeds.sharing_changed(segment, topic)
        controller = self.controllers.of(segment.parent)
        if controller is not None:
            controller.backlog_changed(segment.segment_id)

    def topic_unloaded(self, topic: Topic) -> None:
        """See `TopicEvents`."""
        segment = self.segment_of(topic)
        if segment is None:
            return
        self.feeds.gone(segment, topic)
        controller = self.controllers.of(segment.parent)
        if controller is not None:
            # Its next owner may have reported it earlier, while the one here was still asked.
            controller.backlog_changed(segment.segment_id)

    def _backlog_changed(self, topic: Topic, subscription: str) -> None:
        segment = self.segment_of(topic)
        if segment is None:
            return
        self.feeds.at_end(segment, topic, subscription)
        controller = self.controllers.of(segment.parent)
        if controller is not None:
            controller.backlog_changed(segment.segment_id, subscription)

    # Segments at other brokers

    def remote_attached(
        self, topic: TopicName, segment_id: int, subscription: str, consumer: RemoteConsumer
    ) -> None:
        """See `FeedListener`."""
        controller = self.controllers.of(topic)
        if controller is not None:
            controller.attached(segment_id, subscription, consumer)

    def remote_detached(
        self, topic: TopicName, consumer: RemoteConsumer, *, by_command: bool, seen: bool
    ) -> None:
        """See `FeedListener`."""
        controller = self.controllers.of(topic)
        if controller is not None:
            controller.detached(consumer, by_command=by_command, seen=seen)

    def remote_changed(self, topic: TopicName, segment_id: int) -> None:
        """See `FeedListener`."""
        controller = self.controllers.of(topic)
        if controller is not None:
            controller.backlog_changed(segment_id)

    def segment_of(self, topic: Topic) -> SegmentName | None:
        """The segment that a loaded topic is; None for an ordinary topic."""
        return self._topics.segment_of(topic.name)
