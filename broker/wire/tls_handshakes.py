"""The TLS handshakes of one port that are in progress: their number, their time and their turns.

A handshake waits for its peer, or for its turn: the broker computes one step of one handshake in
each turn of the event loop, because a step takes a millisecond in which nobody else is served.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
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


_ByAddress = dict[str, dict[Handshake, None]]
"""Handshakes by the address of their peers, oldest first."""


class Handshakes:
    """The handshakes of one port.

    A handshake whose peer has sent nothing is a connection without more.  So it counts against the
    connections of the port alone.  From its first step on it takes memory of OpenSSL, and counts
    against two more bounds: of its address, and of all.

    Above a bound the newcomer replaces the handshake that has waited longest for its peer, so that
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
        self._waiting: _ByAddress = {}
        """Those that wait for their peers."""
        self._stepped: _ByAddress = {}
        """Those that had their first step."""
        self._stepped_count = 0
        self._ready: deque[Handshake] = deque()
        self._step_due = False

    def __len__(self) -> int:
        return len(self._addresses)

    def begin(self, handshake: Handshake, address: str) -> bool:
        """Add a handshake that waits for its peer; False if it is refused."""
        if not self._has_room(len(self)) and not self.make_room():
            self._refuse(address)
            return False
        self._addresses[handshake] = address
        self._waiting.setdefault(address, {})[handshake] = None
        return True

    def make_room(self) -> bool:
        """End the handshake that has waited longest for its peer; False if none waits."""
        # Of the address with the most, because the others may be honest.
        oldest = next(iter(_largest(self._waiting)), None)
        return oldest is not None and self._replace(oldest)

    def has_input(self, handshake: Handshake) -> None:
        """Note that bytes of the peer have come: its `step` is called when it is its turn."""
        address = self._addresses.get(handshake)
        if address is None:
            return
        _remove(self._waiting, address, handshake)
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
        _remove(self._waiting, address, handshake)
        self._stepped_count -= _remove(self._stepped, address, handshake)
        if completed:
            self.completed += 1
        else:
            self.failed += 1

    def close(self) -> None:
        """End all handshakes."""
        for each in list(self._addresses):
            self._replace(each)

    def _replace(self, handshake: Handshake) -> bool:
        self.end(handshake, completed=False)
        handshake.abort()
        return True

    def _refuse(self, address: str) -> None:
        self.failed += 1
        log.warning("tls_handshake_refused", remote=address, in_progress=len(self))

    def _step_soon(self) -> None:
        if not self._step_due:
            self._step_due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._step_due = False
        while self._ready:
            handshake = self._ready.popleft()
            if self._may_step(handshake):
                if self._ready:
                    self._step_soon()
                handshake.step()
                return

    def _may_step(self, handshake: Handshake) -> bool:
        """Whether it is within the bounds; if not, it is ended."""
        address = self._addresses.get(handshake)
        if address is None:
            return False
        of_address = self._stepped.get(address, {})
        if handshake in of_address:
            return True
        admitted = True
        if len(of_address) >= self._most_of_address:
            admitted = self._replace_waiting(address)
        elif self._stepped_count >= self._most:
            largest = next(iter(_largest(self._stepped)))
            admitted = self._replace_waiting(self._addresses[largest])
        if not admitted:
            log.warning("tls_handshake_refused", remote=address, in_progress=len(self))
            self._replace(handshake)
            return False
        self._stepped.setdefault(address, {})[handshake] = None
        self._stepped_count += 1
        return True

    def _replace_waiting(self, address: str) -> bool:
        """End the oldest one of an address that had a step and waits for its peer."""
        waiting = self._waiting.get(address, {})
        oldest = next((each for each in self._stepped[address] if each in waiting), None)
        return oldest is not None and self._replace(oldest)


def _largest(by_address: _ByAddress) -> Mapping[Handshake, None]:
    """The handshakes of the address with the most."""
    return max(by_address.values(), key=len, default={})


def _remove(by_address: _ByAddress, address: str, handshake: Handshake) -> bool:
    """Remove a handshake; False if it was not there."""
    of_address = by_address.get(address)
    if of_address is None or handshake not in of_address:
        return False
    del of_address[handshake]
    if not of_address:
        del by_address[address]
    return True
