"""Waiting for the rates of policies: of one topic, one subscription, or the whole broker."""

import asyncio
import enum
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from broker.policies.message_rate import MessageRate
from broker.topics.token_bucket import TokenBucket
from config.bounds import BROKER_RATE_DEBT_S, RELATIVE_RATE_S
from storage.callbacks import ignore

PublishedRates = Callable[[float], tuple[float, float]]
"""The messages and bytes per second that a topic gets; takes the event loop's time."""


class Level(enum.Enum):
    """The level at which a rate is set, by the word of Pulsar's metrics."""

    SUBSCRIPTION = "subscription"
    TOPIC = "topic"
    BROKER = "broker"


ThrottledCounts = Counter[tuple[Level, bool]]
"""How often somebody had to wait, by the level of the rate; True: for the rate in bytes."""


class RateLimit:
    """One rate in messages and in bytes, and those who wait for it, in order.

    Nothing runs while nobody waits: tokens are counted when somebody takes some, and the timer is
    set on the time at which the next one is there.

    Clients say how many messages an entry has.  So that none can take the rate of the whole broker
    away from all others with one small entry, its messages count for at most BROKER_RATE_DEBT_S of
    that rate.
    """

    def __init__(
        self, rate: MessageRate, level: Level, published: PublishedRates | None = None
    ) -> None:
        """`published` is asked for the rate of publishing if `rate` is relative to that."""
        self.rate = rate
        self.level = level
        self._published = published if rate.is_relative else None
        self._loop = asyncio.get_running_loop()
        self._updated_s = now_s = self._loop.time()
        self._messages, self._size = (
            TokenBucket(each, rate.period_s, now_s) if each else None
            for each in (rate.messages, rate.size_bytes)
        )
        self._most_messages = (
            max(1, int(rate.messages * BROKER_RATE_DEBT_S / rate.period_s))
            if level is Level.BROKER
            else sys.maxsize
        )
        """The messages that one entry may count for."""
        self._waiting: dict[Callable[[], None], None] = {}
        self._timer: asyncio.Handle | None = None
        """Calls the next of those that wait."""
        if self._published is not None:
            self._update(now_s)

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits, and comes before those who ask now."""
        return bool(self._waiting)

    @property
    def lacks_bytes(self) -> bool:
        """Whether it is the rate in bytes that has to be waited for longest."""
        now_s = self._loop.time()
        messages_s, size_s = (
            0.0 if each is None else each.wait_s(now_s) for each in (self._messages, self._size)
        )
        return size_s > messages_s

    def take(self, messages: int, size_bytes: int) -> None:
        """Count an entry that was sent."""
        now_s = self._loop.time()
        if self._messages is not None:
            self._messages.take(min(messages, self._most_messages), now_s)
        if self._size is not None:
            self._size.take(size_bytes, now_s)

    def wait_s(self) -> float:
        """Seconds until anything may be sent; 0: now."""
        now_s = self._loop.time()
        if self._published is not None and now_s - self._updated_s >= RELATIVE_RATE_S:
            self._update(now_s)
        wait_s = 0.0 if self._messages is None else self._messages.wait_s(now_s)
        if self._size is not None:
            wait_s = max(wait_s, self._size.wait_s(now_s))
        return wait_s

    def wait(self, then: Callable[[], None]) -> None:
        """Call `then` once, when something may be sent and those who came before were called."""
        self._waiting[then] = None
        if self._timer is None:
            self._aim()

    def forget(self, then: Callable[[], None]) -> None:
        """Do not call `then`."""
        self._waiting.pop(then, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """End: the rate holds no longer, and nobody is called any more."""
        self._published = None
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _aim(self) -> None:
        # A relative rate may rise meanwhile.
        wait_s = self.wait_s()
        if self._published is not None:
            wait_s = min(wait_s, RELATIVE_RATE_S)
        self._timer = self._loop.call_later(wait_s, self._wake)

    def _wake(self) -> None:
        """Call the first of those that wait, and the next one when that one has taken its tokens.

        Calling all of them would cost each token as much as there are: thousands of subscriptions
        may wait for the rate of the broker.
        """
        self._timer = None
        if self.wait_s() > 0:
            self._aim()
            return
        then = next(iter(self._waiting))
        del self._waiting[then]
        try:
            then()
        finally:
            if self._waiting and self._timer is None:
                # A dispatcher that was called sends in the next turn of the loop: before this.
                self._timer = self._loop.call_soon(self._wake)

    def _update(self, now_s: float) -> None:
        """Take the present rate of publishing into the rate."""
        self._updated_s = now_s
        if self._published is None:
            return
        rate, published = self.rate, self._published(now_s)
        if self._messages is not None:
            self._messages.change_rate(rate.messages + published[0] * rate.period_s, now_s)
        if self._size is not None:
            self._size.change_rate(rate.size_bytes + published[1] * rate.period_s, now_s)


class Throttle:
    """The rates that hold for one sender, such as the dispatcher of a subscription.

    `then` is called when it may send again after `allows` was False.
    """

    __slots__ = ("_called_by", "_counts", "_limits", "_then", "_waits_for", "exhausted")

    def __init__(
        self, limits: Sequence[RateLimit], then: Callable[[], None], counts: ThrottledCounts
    ) -> None:
        self._limits = tuple(limits)
        self._then = then
        self._counts = counts
        self._waits_for: RateLimit | None = None
        self._called_by: set[RateLimit] = set()
        """The limits that have called `then`, until something may be sent."""
        self.exhausted = False
        """Whether `take` has taken the last token since `allows` was asked."""

    def allows(self) -> bool:
        """Whether anything may be sent now; if not, `then` is called when it may."""
        if self._waits_for is not None:
            return False
        for limit in self._limits:
            # At a limit that has called this one it has waited for its turn.  It does not again:
            # where many wait at two limits, each would go on sending them to the other's end.
            if limit.wait_s() > 0 or (limit.has_waiting and limit not in self._called_by):
                self._counts[limit.level, limit.lacks_bytes] += 1
                self._waits_for = limit
                limit.wait(self._called)
                return False
        self._called_by.clear()
        self.exhausted = False
        return True

    def take(self, messages: int, size_bytes: int) -> bool:
        """Count what was sent; returns whether nothing more may be sent now."""
        for limit in self._limits:
            limit.take(messages, size_bytes)
            if limit.wait_s() > 0:
                self.exhausted = True
        return self.exhausted

    def close(self) -> None:
        """Wait no longer; `then` is not called again."""
        self._then = ignore
        if self._waits_for is not None:
            self._waits_for.forget(self._called)
            self._waits_for = None

    def _called(self) -> None:
        if self._waits_for is not None:
            self._called_by.add(self._waits_for)
            self._waits_for = None
        self._then()


def changed_limit(
    before: RateLimit | None,
    rate: MessageRate | None,
    level: Level,
    published: PublishedRates | None = None,
) -> RateLimit | None:
    """The limit for a rate: the one of before if the rate is the same, else a new one.

    Throttles with the one of before are to be replaced.
    """
    if before is not None and before.rate == rate:
        return before
    return None if rate is None else RateLimit(rate, level, published)


def in_force(*limits: RateLimit | None) -> tuple[RateLimit, ...]:
    """The limits that are set."""
    return tuple(each for each in limits if each is not None)
