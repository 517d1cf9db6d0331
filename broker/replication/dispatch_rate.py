"""`DispatchRate`: the rate at which one replicator may send."""

from collections.abc import Callable

from broker.topics.throttle import Level, RateLimit, Throttle, ThrottledCounts, changed_limit
from broker.topics.topic import Topic
from storage.callbacks import ignore


class DispatchRate:
    """The replicatorDispatchRate of a topic, as its policies give it now."""

    def __init__(self, topic: Topic, then: Callable[[], None]) -> None:
        """`then` is called when it may send again after `allows` was False, or at another rate."""
        self._topic: Topic | None = topic
        self._then = then
        self._limit: RateLimit | None = None
        self._throttle: Throttle | None = None

    def apply(self) -> None:
        """Send at the rate that the topic's policies give now."""
        topic = self._topic
        if topic is None:
            return
        rate = topic.policies.replicator_dispatch_rate
        limit = changed_limit(self._limit, rate, Level.TOPIC, topic.published_rates)
        if limit is not self._limit:
            self._end()
            self._limit = limit
            if limit is not None:
                self._throttle = Throttle((limit,), self._then, ThrottledCounts())
            self._then()

    def allows(self) -> bool:
        """Whether anything may be sent now; if not, `then` is called when it may."""
        return self._throttle is None or self._throttle.allows()

    def take(self, messages: int, size_bytes: int) -> None:
        """Count what was sent."""
        if self._throttle is not None:
            self._throttle.take(messages, size_bytes)

    def close(self) -> None:
        """Wait for nothing more."""
        self._end()
        # The replicator has this object, and `then` has the replicator.
        self._topic, self._then = None, ignore

    def _end(self) -> None:
        if self._throttle is not None:
            self._throttle.close()
        if self._limit is not None:
            self._limit.close()
        self._throttle = self._limit = None
