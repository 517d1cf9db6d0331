"""Notices peers that have gone while their connections are not read.

A connection that is not read gets no end of file: its requests would be worked on for nobody.
"""

import asyncio
import enum
import socket
import sys
from collections.abc import Collection
from typing import Final, Protocol

from config.bounds import GONE_PEER_CHECK_S

_TCP_CLOSE: Final = 7
_TCP_CLOSE_WAIT: Final = 8
_TCP_LAST_ACK: Final = 9
"""States of a socket on Linux, the first byte of its TCP_INFO."""


class PeerState(enum.Enum):
    """What is known of the peer of a connection."""

    PRESENT = "present"
    CLOSED = "closed"
    """It sends nothing more; what it sent before may be unread."""
    RESET = "reset"
    """It has refused what was sent to it, or is lost."""


class PausedConnection(Protocol):
    """A connection as this module needs it."""

    @property
    def paused(self) -> Collection[str]:
        """Reasons why reading is paused; empty while the connection is read."""
        ...

    @property
    def socket(self) -> socket.socket | None:
        """The socket, as long as it is open."""
        ...

    def probe(self) -> None:
        """Send something small to the peer, unless output is queued anyway."""
        ...

    def abort(self, why: str) -> None:
        """End the connection at once; what is queued is lost."""
        ...


class GonePeers:
    """Ends paused connections whose peers have closed them.

    One timer serves all connections.  Connections that are read are left alone.  A peer that has
    closed has gone when two checks in a row, `interval_s` apart, say so: a connection that is
    paused for a moment only is served to its end.  A peer that has sent more than the sockets hold
    cannot even close; a probe is sent to it, which the system of a peer that has gone refuses.
    """

    def __init__(
        self, connections: Collection[PausedConnection], interval_s: float = GONE_PEER_CHECK_S
    ) -> None:
        """Check `connections`, which may change."""
        self._connections = connections
        self._interval_s = interval_s
        self._suspected: set[PausedConnection] = set()
        """Connections whose peers had closed at the last check."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check from now on."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._check)

    async def stop(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self.start()
        suspected, self._suspected = self._suspected, set()
        for connection in list(self._connections):
            if not connection.paused:
                continue
            state = peer_state(connection.socket)
            if state is PeerState.PRESENT:
                connection.probe()
            elif state is PeerState.RESET or connection in suspected:
                connection.abort("the peer has gone")
            else:
                self._suspected.add(connection)


def peer_state(peer_socket: socket.socket | None) -> PeerState:
    """The state of the peer, though bytes that it sent may be unread."""
    if peer_socket is None:
        return PeerState.PRESENT
    try:
        if sys.platform == "linux":
            info = peer_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] == _TCP_CLOSE:
                return PeerState.RESET
            closed = info[0] in (_TCP_CLOSE_WAIT, _TCP_LAST_ACK)
        else:
            # Elsewhere the end is seen only behind everything that was sent before it.
            closed = peer_socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return PeerState.PRESENT
    except ConnectionError:
        return PeerState.RESET
    except (OSError, ValueError):
        # Not a TCP socket, or closed meanwhile: the transport reports that.
        return PeerState.PRESENT
    return PeerState.CLOSED if closed else PeerState.PRESENT
