"""The TLS handshakes of one port that are in progress: their number, their time and their turns.

A handshake waits for its peer, or for its turn: the broker computes one step of one handshake in
each turn of the event loop, because a step takes a millisecond in which nobody else is served.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from config.bounds import TLS_HANDSHAKES, TLS_HANDSHAKES_OF_ADDRESS

log = structlog.get_logger(__name__)


class Handshake(Protocol):
    """A TLS handshake in progress."""

    def step(self) -> None:
        """Go on with the bytes that have come."""
        ...

    def abort(self) -> None:
        """End the connection at once."""
        ...


class Handshakes:
    """The handshakes of one port, bounded for each address and in all.

    A newcomer above a bound replaces the handshake that has waited longest for its peer, so that
    peers that send nothing do not lock out others.  While none waits for its peer, the newcomer is
    refused.
    """

    def __init__(
        self,
        has_room: Callable[[int], bool],
        *,
        most: int = TLS_HANDSHAKES,
        most_of_address: int = TLS_HANDSHAKES_OF_ADDRESS,
    ) -> None:
        """`has_room` says whether the port may have a connection more, beside these handshakes."""
        self.completed = 0
        """Handshakes that succeeded, since the start."""
        self.failed = 0
        """Handshakes that did not succeed, for whatever reason, refused ones included."""
        self._has_room = has_room
        self._most = most
        self._most_of_address = most_of_address
        self._addresses: dict[Handshake, str] = {}
        self._waiting: dict[str, dict[Handshake, None]] = {}
        """Those that wait for their peers, by address; the ones that have waited longest first."""
        self._counts: dict[str, int] = {}
        self._ready: deque[Handshake] = deque()
        self._step_due = False

    def __len__(self) -> int:
        return len(self._addresses)

    def begin(self, handshake: Handshake, address: str) -> bool:
        """Add a handshake that waits for its peer; False if it is refused."""
        if self._counts.get(address, 0) >= self._most_of_address:
            admitted = self._replace_one_of(address)
        elif len(self) >= self._most or not self._has_room(len(self)):
            admitted = self.make_room()
        else:
            admitted = True
        if not admitted:
            self.failed += 1
            log.warning("tls_handshake_refused", remote=address, in_progress=len(self))
            return False
        self._addresses[handshake] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        self._waiting.setdefault(address, {})[handshake] = None
        return True

    def make_room(self) -> bool:
        """End the handshake that has waited longest for its peer; False if none waits."""
        # Of the address with the most, because the others may be honest.
        address = max(self._waiting, key=lambda each: len(self._waiting[each]), default=None)
        return address is not None and self._replace_one_of(address)

    def has_input(self, handshake: Handshake) -> None:
        """Note that bytes of the peer have come: its `step` is called when it is its turn."""
        address = self._addresses.get(handshake)
        if address is None:
            return
        self._stop_waiting(handshake, address)
        self._ready.append(handshake)
        self._step_soon()

    def needs_input(self, handshake: Handshake) -> None:
        """Note that the handshake waits for its peer again."""
        address = self._addresses.get(handshake)
        if address is not None:
            self._waiting.setdefault(address, {})[handshake] = None

    def end(self, handshake: Handshake, *, completed: bool) -> None:
        """Forget a handshake that has ended.  Unknown ones are ignored."""
        address = self._addresses.pop(handshake, None)
        if address is None:
            return
        self._stop_waiting(handshake, address)
        left = self._counts[address] - 1
        if left:
            self._counts[address] = left
        else:
            del self._counts[address]
        if completed:
            self.completed += 1
        else:
            self.failed += 1

    def close(self) -> None:
        """End all handshakes."""
        for each in list(self._addresses):
            self.end(each, completed=False)
            each.abort()

    def _stop_waiting(self, handshake: Handshake, address: str) -> None:
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.pop(handshake, None)
            if not waiting:
                del self._waiting[address]

    def _replace_one_of(self, address: str) -> bool:
        waiting = self._waiting.get(address)
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.end(oldest, completed=False)
        oldest.abort()
        return True

    def _step_soon(self) -> None:
        if not self._step_due:
            self._step_due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._step_due = False
        while self._ready:
            handshake = self._ready.popleft()
            if handshake in self._addresses:
                if self._ready:
                    self._step_soon()
                handshake.step()
                return
