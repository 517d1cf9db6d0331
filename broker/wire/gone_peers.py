"""Notices peers that have gone while their connections are not read.

A connection that is not read gets no end of file: its requests would be worked on for nobody.
"""

import asyncio
import socket
import sys
from collections.abc import Collection
from typing import Final, Protocol

from config.bounds import GONE_PEER_CHECK_S

_TCP_STATES_AFTER_FIN: Final = frozenset({7, 8, 9})
"""TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK of Linux: the peer sends nothing more."""


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

    def abort(self, why: str) -> None:
        """End the connection at once; what is queued is lost."""
        ...


class GonePeers:
    """Ends paused connections whose peers have closed them.

    One timer serves all connections.  Connections that are read are left alone.  A peer has gone
    when two checks in a row, GONE_PEER_CHECK_S apart, say so: a connection that is paused for a
    moment only is served to its end.
    """

    def __init__(self, connections: Collection[PausedConnection]) -> None:
        """Check `connections`, which may change."""
        self._connections = connections
        self._suspected: set[PausedConnection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check from now on."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(GONE_PEER_CHECK_S, self._check)

    async def stop(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self.start()
        gone = {
            connection
            for connection in list(self._connections)
            if connection.paused and peer_is_gone(connection.socket)
        }
        for connection in gone & self._suspected:
            connection.abort("the peer has gone")
        self._suspected = gone - self._suspected


def peer_is_gone(peer_socket: socket.socket | None) -> bool:
    """Whether the peer has closed the connection, though unread bytes may be left."""
    if peer_socket is None:
        return False
    try:
        if sys.platform == "linux":
            state = peer_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            return state[0] in _TCP_STATES_AFTER_FIN
        # Elsewhere the end is seen only behind everything that was sent before it.
        return peer_socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    except (OSError, ValueError):
        # Not a TCP socket, or closed meanwhile: the transport reports that.
        return False
