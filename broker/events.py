"""What topics tell scalable topics: the one door through which segments report upwards.

Rules: the calls run on the event loop, return at once and never raise; whoever implements them
starts its own tasks.  A topic that is no segment reports too; the receiver ignores it.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.topic import Topic


class SegmentEvents(Protocol):
    """Implemented by `broker.scalable`."""

    def consumer_attached(self, topic: "Topic", subscription: str, consumer: "Consumer") -> None:
        """A consumer was added to a subscription."""
        ...

    def consumer_closed(
        self, topic: "Topic", subscription: str, consumer: "Consumer", *, by_command: bool
    ) -> None:
        """A consumer is gone: by CLOSE_CONSUMER (`by_command`) or with its connection."""
        ...

    def subscription_drained(self, topic: "Topic", subscription: str) -> None:
        """The topic is sealed and the subscription's backlog has become 0."""
        ...

    def subscription_rewound(self, topic: "Topic", subscription: str) -> None:
        """A seek: what was drained need not be drained any longer."""
        ...

    def producers_gone(self, topic: "Topic") -> None:
        """The last producer of the topic left."""
        ...
