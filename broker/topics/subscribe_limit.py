"""The subscribe rate of a topic: how often one consumer may subscribe."""

from broker.policies.message_rate import SubscribeRate
from broker.topics.token_bucket import TokenBucket
from config.bounds import SUBSCRIBE_RATE_CONSUMERS

ConsumerKey = tuple[str, str, int]
"""The host of a client, and the name and the id of its consumer (as in Pulsar)."""


class SubscribeLimit:
    """Counts the SUBSCRIBEs of each consumer.  Pure: the time is an argument.

    Of more than `most_consumers` the one that has subscribed first is forgotten.
    """

    __slots__ = ("_buckets", "_most_consumers", "_rate")

    def __init__(self, most_consumers: int = SUBSCRIBE_RATE_CONSUMERS) -> None:
        self._most_consumers = most_consumers
        self._rate: SubscribeRate | None = None
        self._buckets: dict[ConsumerKey, TokenBucket] = {}

    def apply(self, rate: SubscribeRate | None) -> None:
        """Allow this rate from now on; None: any."""
        if rate != self._rate:
            self._rate = rate
            self._buckets.clear()

    def admits(self, consumer: ConsumerKey, now_s: float) -> bool:
        """Count a SUBSCRIBE if the rate allows it; returns whether it does."""
        rate = self._rate
        if rate is None:
            return True
        bucket = self._buckets.get(consumer)
        if bucket is None:
            if len(self._buckets) >= self._most_consumers:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[consumer] = TokenBucket(rate.subscribes, rate.period_s, now_s)
        if bucket.wait_s(now_s) > 0:
            return False
        bucket.take(1, now_s)
        return True
