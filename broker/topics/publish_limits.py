"""Limits of publishing: the largest message, and the bytes that are not yet durable."""

from typing import Protocol

from config.bounds import ENTRY_HEADROOM, MAX_MESSAGE_SIZE

PUBLISHING = "publishing"


def largest_message(max_entry_bytes: int) -> int:
    """The largest payload of an entry, over a store that takes entries of `max_entry_bytes`.

    The entry may be larger by ENTRY_HEADROOM.
    """
    return min(MAX_MESSAGE_SIZE, max_entry_bytes - ENTRY_HEADROOM)


class Publisher(Protocol):
    """A connection that publishes."""

    inflight_bytes: int

    def pause_reading(self, why: str) -> None:
        """Read nothing, for this reason."""
        ...

    def resume_reading(self, why: str) -> None:
        """Withdraw the reason."""
        ...


class PublishLimits:
    """Counts the bytes in flight of every connection and of the process.

    A connection above its own bound is not read until half of that bound is free.  While the
    process is above the bound of all, neither is any connection that publishes.
    """

    __slots__ = ("_connection_bytes", "_over_total", "_paused", "_total_bytes", "inflight_bytes")

    def __init__(self, *, connection_bytes: int, total_bytes: int) -> None:
        self._connection_bytes = connection_bytes
        self._total_bytes = total_bytes
        self._over_total = False
        self._paused: dict[Publisher, None] = {}
        self.inflight_bytes = 0

    def started(self, publisher: Publisher, size: int) -> None:
        """Count `size` bytes that were accepted from `publisher`."""
        publisher.inflight_bytes += size
        self.inflight_bytes += size
        if self.inflight_bytes > self._total_bytes:
            self._over_total = True
        elif publisher.inflight_bytes <= self._connection_bytes:
            return
        if publisher not in self._paused:
            self._paused[publisher] = None
            publisher.pause_reading(PUBLISHING)

    def finished(self, publisher: Publisher, size: int) -> None:
        """Take back `size` bytes that are durable, or failed."""
        publisher.inflight_bytes -= size
        self.inflight_bytes -= size
        if not self._paused:
            return
        if not self._over_total:
            self._resume(publisher)
        elif self.inflight_bytes <= self._total_bytes // 2:
            self._over_total = False
            for paused in list(self._paused):
                self._resume(paused)

    def _resume(self, publisher: Publisher) -> None:
        if publisher in self._paused and publisher.inflight_bytes <= self._connection_bytes // 2:
            del self._paused[publisher]
            publisher.resume_reading(PUBLISHING)
