"""Consumers that a client closed a moment ago, for acknowledgements that were on their way."""

from weakref import ref

from broker.topics.consumer import ConsumedSubscription, Consumer
from config.bounds import CLOSED_CONSUMERS_KEPT, LATE_ACK_S


class ClosedConsumer:
    """A consumer that its client closed.

    It keeps neither the consumer nor its topic in memory.
    """

    __slots__ = ("_seeks", "_subscription", "closed_s", "type")

    def __init__(self, consumer: Consumer, closed_s: float) -> None:
        subscription = consumer.subscription
        self._subscription = ref(subscription)
        self._seeks = subscription.seeks
        self.type = consumer.type
        self.closed_s = closed_s

    @property
    def subscription(self) -> ConsumedSubscription | None:
        """The subscription, while acknowledgements of this consumer are still right.

        None once it was moved by a seek, closed or deleted: a message that was acknowledged before
        a seek is to be delivered again after it.
        """
        subscription = self._subscription()
        if subscription is None or subscription.closed or subscription.seeks != self._seeks:
            return None
        return subscription


class ClosedConsumers:
    """The newest closed consumers of one connection, by the client's ids.

    A client that groups acknowledgements may write the last group just behind CLOSE_CONSUMER.  The
    application has processed these messages, so they are acknowledged: see
    `Subscription.acknowledge`.  At most CLOSED_CONSUMERS_KEPT are remembered, LATE_ACK_S each.
    Times are seconds of the event loop.
    """

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[int, ClosedConsumer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, consumer: Consumer, now_s: float) -> None:
        """Remember a consumer that is being closed."""
        self._forget_old(now_s)
        closed = self._by_id
        closed.pop(consumer.consumer_id, None)
        closed[consumer.consumer_id] = ClosedConsumer(consumer, now_s)
        if len(closed) > CLOSED_CONSUMERS_KEPT:
            del closed[next(iter(closed))]

    def get(self, consumer_id: int, now_s: float) -> ClosedConsumer | None:
        """Return a closed consumer; None if there was none, or it was closed too long ago."""
        self._forget_old(now_s)
        return self._by_id.get(consumer_id)

    def forget(self, consumer_id: int) -> None:
        """Forget the consumer of an id that is used again."""
        self._by_id.pop(consumer_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._by_id.clear()

    def _forget_old(self, now_s: float) -> None:
        # They are in the order of their closing.
        while self._by_id:
            consumer_id, oldest = next(iter(self._by_id.items()))
            if now_s - oldest.closed_s < LATE_ACK_S:
                return
            del self._by_id[consumer_id]
