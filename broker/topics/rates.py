"""Pure: rates per second of counters that only grow, over a sliding window."""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from config.bounds import RATE_SHORTEST_S, RATE_WINDOW_S

Counts = tuple[int, ...]
"""The values of some counters, read at the same time; always in the same order."""

_Point = tuple[float, Counts]
_OLDEST: Final = 0


class RateSampler:
    """Turns readings of counters into rates per second.

    The counters were 0 at `start_s`.  `sample` stores a reading, about every RATE_SAMPLE_S; `rates`
    compares the counters of now with those at the beginning of the window, between the two samples
    around that time.  So the rate of a new counter is right at once, and that of one that stopped
    falls to 0 within the window.  Counters that do not change cost one comparison for each sample,
    and no memory.

    Times are seconds of one monotonic clock, such as that of the event loop.
    """

    __slots__ = ("_changed_s", "_counts", "_points", "_read_s")

    def __init__(self, start_s: float, counters: int) -> None:
        """`counters` is the length of `Counts`."""
        self._points: list[_Point] | None = None
        """Readings before the last change, oldest first; at most one is older than the window."""
        self._counts: Counts = (0,) * counters
        self._changed_s = start_s
        """Time of the first reading of the present counts."""
        self._read_s = start_s
        """Time of the last reading."""

    @property
    def stored(self) -> int:
        """Number of readings before the present one that are in memory."""
        return 0 if self._points is None else len(self._points)

    def sample(self, now_s: float, counts: Counts) -> None:
        """Store a reading."""
        if counts == self._counts:
            self._read_s = now_s
            if self._points is not None and now_s - self._changed_s >= RATE_WINDOW_S:
                self._points = None
            return
        points = self._points
        if points is None:
            points = self._points = []
        points.append((self._changed_s, self._counts))
        if self._read_s > self._changed_s:
            points.append((self._read_s, self._counts))
        while len(points) > 1 and points[_OLDEST + 1][0] <= now_s - RATE_WINDOW_S:
            del points[_OLDEST]
        self._counts = counts
        self._changed_s = self._read_s = now_s

    def rates(
        self, now_s: float, counts: Counts, *, over_s: float | None = None
    ) -> tuple[float, ...]:
        """Return how much each counter grew per second, in the order of `counts`.

        `counts` are the counters of now.  The rates cover the last `over_s` seconds (default and at
        most: the window), or the time since `start_s` if that is shorter, but not less than
        RATE_SHORTEST_S.
        """
        window_s = RATE_WINDOW_S if over_s is None else min(over_s, RATE_WINDOW_S)
        begin_s, before = self._at(now_s - window_s, now_s, counts)
        took_s = max(now_s - begin_s, RATE_SHORTEST_S)
        return tuple(
            max(0.0, (after - then) / took_s) for after, then in zip(counts, before, strict=True)
        )

    def _at(self, time_s: float, now_s: float, counts: Counts) -> tuple[float, tuple[float, ...]]:
        """Return the counters at a time, and that time; not before the oldest reading."""
        later: _Point = (now_s, counts)
        for point in self._newest_first():
            if point[0] <= time_s:
                return time_s, _between(point, later, time_s)
            later = point
        return later

    def _newest_first(self) -> list[_Point]:
        points = [(self._read_s, self._counts), (self._changed_s, self._counts)]
        if self._points is not None:
            points.extend(reversed(self._points))
        return points


class SampledProducer(Protocol):
    """A producer with counters."""

    rate_sampler: RateSampler

    @property
    def traffic(self) -> tuple[int, int, int]:
        """Messages and bytes that were published, and messages that were dropped."""
        ...


class SampledProducers(Protocol):
    """The producers of a topic, and the counters of those that it had before."""

    past_messages_in: int
    past_bytes_in: int

    @property
    def by_name(self) -> Mapping[str, SampledProducer]:
        """The attached producers."""
        ...


class SampledSubscription(Protocol):
    """A subscription with counters, and its consumers."""

    @property
    def traffic(self) -> tuple[int, ...]:
        """Its counters, those of messages and bytes that were sent first."""
        ...

    def sample_rates(self, now_s: float) -> tuple[int, ...]:
        """Sample the counters; returns those of the subscription, of messages and bytes first."""
        ...


def topic_traffic(
    producers: SampledProducers,
    subscriptions: Mapping[str, SampledSubscription],
    past_out: tuple[int, int],
) -> tuple[int, int, int, int]:
    """The counters of a topic: messages and bytes that were published, and that were sent.

    `past_out` are the messages and bytes of subscriptions that the topic had before.
    """
    messages_in, bytes_in = producers.past_messages_in, producers.past_bytes_in
    for producer in producers.by_name.values():
        messages, size_bytes, _ = producer.traffic
        messages_in += messages
        bytes_in += size_bytes
    messages_out, bytes_out = past_out
    for subscription in subscriptions.values():
        messages, size_bytes, *_ = subscription.traffic
        messages_out += messages
        bytes_out += size_bytes
    return messages_in, bytes_in, messages_out, bytes_out


def sample_topic(
    sampler: RateSampler,
    now_s: float,
    producers: SampledProducers,
    subscriptions: Mapping[str, SampledSubscription],
    past_out: tuple[int, int],
) -> Iterator[None]:
    """Sample producers and subscriptions of a topic, one in each step, and then their sums.

    The sums are those of `topic_traffic`.  A subscription that is deleted between two steps is
    still counted.
    """
    messages_in, bytes_in = producers.past_messages_in, producers.past_bytes_in
    messages_out, bytes_out = past_out
    followers = list(subscriptions.values())
    for producer in list(producers.by_name.values()):
        published = producer.traffic
        producer.rate_sampler.sample(now_s, published)
        messages_in += published[0]
        bytes_in += published[1]
        yield
    for subscription in followers:
        delivered = subscription.sample_rates(now_s)
        messages_out += delivered[0]
        bytes_out += delivered[1]
        yield
    sampler.sample(now_s, (messages_in, bytes_in, messages_out, bytes_out))
    yield


def _between(first: _Point, second: _Point, time_s: float) -> tuple[float, ...]:
    """Interpolate the counters at a time between two readings."""
    (first_s, before), (second_s, after) = first, second
    if second_s <= first_s:
        return after
    share = (time_s - first_s) / (second_s - first_s)
    return tuple(then + (now - then) * share for then, now in zip(before, after, strict=True))
