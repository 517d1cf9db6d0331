"""The account of the bytes that a broker holds for its peers, with one bound for all of them.

What counts: the bytes of incomplete frames, frames that wait while their connection is not read,
and queued output.  A peer counts from the moment on at which some KiB of it remain; one whose
frames are small or whole, and whose output leaves at once, costs nothing here.
"""

from collections.abc import Callable
from typing import Protocol

from config.bounds import PEER_PROGRESS_BYTES

_LONGEST_STALL_S = 10.0
"""A longer stall counts as this: few bytes that are held for long do little harm."""
_SHORTEST_STALL_S = 0.001
"""A shorter stall counts as this, so that bytes decide among peers that all make progress."""


class Holder(Protocol):
    """A peer for which bytes are held."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        ...

    @property
    def progress_bytes(self) -> int:
        """Bytes that the peer has sent or read so far; it never falls."""
        ...

    @property
    def waits_for_broker(self) -> bool:
        """Whether the broker is the reason that the bytes are held, and not the peer."""
        ...

    def give_up(self) -> None:
        """End the connection soon, and not within this call."""
        ...


class _Held:
    """The bytes of one peer, and when it last made progress."""

    __slots__ = ("bytes", "progress", "since_s")

    def __init__(self, progress: int, since_s: float) -> None:
        self.bytes = 0
        self.progress = progress
        self.since_s = since_s


class PeerMemory:
    """Counts the bytes held for each peer; above `limit` bytes it ends connections.

    First ends the one with the most bytes multiplied by the time since it made progress: since it
    sent or read PEER_PROGRESS_BYTES.  So peers go first that leave much and move nothing, before a
    peer that is sending one large message.  One that has its fair share at most, which is the limit
    divided by the most connections, is never ended.
    """

    def __init__(self, limit: int, max_connections: int, now_s: Callable[[], float]) -> None:
        """`now_s` is any monotonic clock in seconds."""
        self.total = 0
        """Bytes held for all peers, as last reported."""
        self.given_up = 0
        """Connections that were ended, since the start."""
        self._limit = limit
        self._check_above = limit
        self._fair_share = limit // max_connections
        self._now_s = now_s
        self._held: dict[Holder, _Held] = {}

    def report(self, holder: Holder) -> None:
        """Take the present bytes of a peer; may end connections, this one included."""
        self._update(holder, self._now_s())
        if self.total > self._check_above:
            self._check()

    def forget(self, holder: Holder) -> None:
        """Note that nothing is held for a peer any more.  Unknown ones are ignored."""
        held = self._held.pop(holder, None)
        if held is not None:
            self.total -= held.bytes

    def refresh(self) -> int:
        """Ask every peer again, as output leaves without a report; returns the total."""
        now_s = self._now_s()
        for holder in list(self._held):
            self._update(holder, now_s)
        return self.total

    def _update(self, holder: Holder, now_s: float) -> None:
        size = holder.held_bytes
        held = self._held.get(holder)
        if size == 0:
            if held is not None:
                del self._held[holder]
                self.total -= held.bytes
            return
        progress = holder.progress_bytes
        if held is None:
            held = self._held[holder] = _Held(progress, now_s)
        elif progress - held.progress >= PEER_PROGRESS_BYTES or holder.waits_for_broker:
            held.progress, held.since_s = progress, now_s
        self.total += size - held.bytes
        held.bytes = size

    def _check(self) -> None:
        self.refresh()
        if self.total > self._limit:
            self._end_connections()
        # Every peer is asked again only after some more bytes, not at each report above the limit.
        self._check_above = max(self._limit, self.total) + self._limit // 64

    def _end_connections(self) -> None:
        """End connections until an eighth of the limit is free, or all have their fair share."""
        now_s = self._now_s()

        def harm(holder: Holder) -> float:
            held = self._held[holder]
            stall_s = min(max(now_s - held.since_s, _SHORTEST_STALL_S), _LONGEST_STALL_S)
            return held.bytes * stall_s

        above = [each for each, held in self._held.items() if held.bytes > self._fair_share]
        for holder in sorted(above, key=harm, reverse=True):
            self.forget(holder)
            self.given_up += 1
            holder.give_up()
            if self.total <= self._limit - self._limit // 8:
                return
