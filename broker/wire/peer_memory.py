"""The account of the bytes that a broker holds for its peers, with one bound for all of them.

What counts: the bytes of incomplete frames, frames that wait while their connection is not read,
and queued output.  A peer counts from the moment on at which some KiB of it remain; one whose
frames are small or whole, and whose output leaves at once, costs nothing here.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from config.bounds import BEFORE_LOGIN_BYTES_OF_ADDRESS, PEER_PROGRESS_BYTES

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
    def address_before_login(self) -> str | None:
        """The address of a peer that has not logged in; None for any other."""
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

    __slots__ = ("address", "bytes", "progress", "since_s")

    def __init__(self, progress: int, since_s: float) -> None:
        self.address: str | None = None
        """That of a peer that had not logged in when it was asked last."""
        self.bytes = 0
        self.progress = progress
        self.since_s = since_s


class PeerMemory:
    """Counts the bytes held for each peer; above `limit` bytes it ends connections.

    First ends the one with the most bytes multiplied by the time since it made progress: since it
    sent or read PEER_PROGRESS_BYTES.  So peers go first that leave much and move nothing, before a
    peer that is sending one large message.  One that has its fair share at most, which is the limit
    divided by the most connections, is never ended for others.

    Peers that have not logged in are also bounded by their addresses, to `before_login_bytes` each.
    """

    def __init__(
        self,
        limit: int,
        max_connections: int,
        now_s: Callable[[], float],
        *,
        before_login_bytes: int = BEFORE_LOGIN_BYTES_OF_ADDRESS,
    ) -> None:
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
        self._before_login_bytes = before_login_bytes
        self._of_address: dict[str, int] = {}
        """Bytes of peers that have not logged in."""

    def report(self, holder: Holder) -> None:
        """Take the present bytes of a peer; may end connections, this one included."""
        address = self._update(holder, self._now_s())
        if address is not None and self._of_address[address] > self._before_login_bytes:
            self._end_connections_of(address)
        if self.total > self._check_above:
            self._check()

    def forget(self, holder: Holder) -> None:
        """Note that nothing is held for a peer any more.  Unknown ones are ignored."""
        held = self._held.pop(holder, None)
        if held is not None:
            self._count(held, 0, None)

    def refresh(self) -> int:
        """Ask every peer again, as output leaves without a report; returns the total."""
        now_s = self._now_s()
        for holder in list(self._held):
            self._update(holder, now_s)
        return self.total

    def _update(self, holder: Holder, now_s: float) -> str | None:
        """Ask a peer; returns its address if it holds bytes and has not logged in."""
        size = holder.held_bytes
        held = self._held.get(holder)
        if size == 0:
            if held is not None:
                del self._held[holder]
                self._count(held, 0, None)
            return None
        progress = holder.progress_bytes
        if held is None:
            held = self._held[holder] = _Held(progress, now_s)
        elif progress - held.progress >= PEER_PROGRESS_BYTES or holder.waits_for_broker:
            held.progress, held.since_s = progress, now_s
        self._count(held, size, holder.address_before_login)
        return held.address

    def _count(self, held: _Held, size: int, address: str | None) -> None:
        self.total += size - held.bytes
        if held.address is not None:
            rest = self._of_address[held.address] - held.bytes
            if rest:
                self._of_address[held.address] = rest
            else:
                del self._of_address[held.address]
        if address is not None:
            self._of_address[address] = self._of_address.get(address, 0) + size
        held.bytes, held.address = size, address

    def _check(self) -> None:
        self.refresh()
        if self.total > self._limit:
            self._end_connections()
        # Every peer is asked again only after some more bytes, not at each report above the limit.
        self._check_above = max(self._limit, self.total) + self._limit // 64

    def _end_connections(self) -> None:
        """End connections until an eighth of the limit is free, or all have their fair share."""
        above = [each for each, held in self._held.items() if held.bytes > self._fair_share]
        enough = self._limit - self._limit // 8
        for holder in self._most_harmful_first(above):
            self._end(holder)
            if self.total <= enough:
                return

    def _end_connections_of(self, address: str) -> None:
        """End connections that have not logged in until an eighth of their bound is free."""
        now_s = self._now_s()
        for each in [each for each, held in self._held.items() if held.address == address]:
            self._update(each, now_s)  # It may have logged in meanwhile.
        found = [each for each, held in self._held.items() if held.address == address]
        enough = self._before_login_bytes - self._before_login_bytes // 8
        for holder in self._most_harmful_first(found):
            if self._of_address.get(address, 0) <= enough:
                return
            self._end(holder)

    def _most_harmful_first(self, holders: Iterable[Holder]) -> list[Holder]:
        now_s = self._now_s()

        def harm(holder: Holder) -> float:
            held = self._held[holder]
            stall_s = min(max(now_s - held.since_s, _SHORTEST_STALL_S), _LONGEST_STALL_S)
            return held.bytes * stall_s

        return sorted(holders, key=harm, reverse=True)

    def _end(self, holder: Holder) -> None:
        self.forget(holder)
        self.given_up += 1
        holder.give_up()
