"""`SentCounts`: what one replicator has sent, and at what rates."""

import asyncio
from typing import Protocol

from broker.topics.rates import RateSampler
from broker.topics.replication import OutboundStats
from magnetar.wire.connection import Connection


class Unsent(Protocol):
    """The entries that are to be sent."""

    expired_total: int
    """Entries that were too old."""

    @property
    def backlog(self) -> int:
        """The number of entries that are not sent, or not stored there yet."""
        ...


class SentCounts:
    """The counters of one replicator since its topic was loaded."""

    def __init__(self, unsent: Unsent) -> None:
        self.messages = 0
        """Messages sent, those that were sent again too."""
        self.bytes = 0
        self.opened_batches = 0
        """Batches that were opened to be divided."""
        self.skipped_expired = 0
        """Entries that were too old when they were read."""
        self.dropped = 0
        """Messages that were not sent, of a non-persistent topic."""
        self._unsent = unsent
        self._sampler = RateSampler(asyncio.get_running_loop().time(), 4)

    @property
    def expired(self) -> int:
        """Entries that were too old to be sent."""
        return self.skipped_expired + self._unsent.expired_total

    def sample(self, now_s: float) -> None:
        """Read the counters; `now_s` is the event loop's time."""
        self._sampler.sample(now_s, self._all)

    def stats(
        self,
        now_s: float,
        *,
        connected: bool,
        oldest_s: float | None,
        connection: Connection | None,
        connected_ms: int,
        failure: str | None,
    ) -> OutboundStats:
        """The statistics of the replicator; `now_s` is the event loop's time.

        `oldest_s` is when the oldest entry was sent that waits for its receipt; None without any.
        """
        messages_per_s, bytes_per_s, expired_per_s, dropped_per_s = self._sampler.rates(
            now_s, self._all
        )
        return OutboundStats(
            messages=self.messages,
            bytes=self.bytes,
            messages_per_s=messages_per_s,
            bytes_per_s=bytes_per_s,
            expired=self.expired,
            expired_per_s=expired_per_s,
            backlog=self._unsent.backlog,
            connected=connected,
            delay_s=0.0 if oldest_s is None else now_s - oldest_s,
            connection=None if connection is None else str(connection.address.physical),
            connected_ms=connected_ms,
            failure=failure,
            opened_batches=self.opened_batches,
            dropped=self.dropped,
            dropped_per_s=dropped_per_s,
        )

    @property
    def _all(self) -> tuple[int, int, int, int]:
        return self.messages, self.bytes, self.expired, self.dropped
