"""Bounds HTTP connections in number and in time.

aiohttp times neither the head of a request nor a peer that leaves its answer unread, and takes any
number of connections.  `HttpConnection` stands between the transport and aiohttp's own protocol:
it passes everything on, and closes the connection when a time is over.

It also frees requests that aiohttp cannot read, and keeps their bytes out of the log.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from broker.admin.request_log import drop_frames
from broker.wire.tls_handshakes import Handshakes
from config.bounds import HTTP_CHECK_S, HTTP_HEAD_S, HTTP_WRITE_S

UNREADABLE: Final = "The request cannot be read."


class HttpConnections:
    """The HTTP connections of one server, at most `most` of them.

    A connection waits while it serves no whole request: of a role, if there is authentication.  A
    newcomer above the bound replaces the one that has waited longest, so that neither half-sent
    requests nor wrong credentials lock out others; while all are serving the newcomer is closed.
    TLS handshakes count too: one that waits for its peer is replaced before any connection is.
    """

    def __init__(self, most: int) -> None:
        self.handshakes = Handshakes(self._has_room)
        """The TLS handshakes of the port with TLS."""
        self._most = most
        self._open: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def protocol_factory(
        self, make_protocol: Callable[[], asyncio.Protocol]
    ) -> Callable[[], asyncio.Protocol]:
        """A factory of protocols that pass everything on to those of `make_protocol`."""
        return lambda: HttpConnection(self, make_protocol())

    def add(self, connection: "HttpConnection") -> bool:
        """Add a new connection; False if it is to be closed, as the bound is reached."""
        if (
            len(self._open) + len(self.handshakes) >= self._most
            and not self.handshakes.make_room()
            and not self._replace_oldest()
        ):
            return False
        self._open.add(connection)
        self._waiting[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HTTP_CHECK_S, self._check)
        return True

    def discard(self, connection: "HttpConnection") -> None:
        """Forget a connection that ended."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def begin_request(self, connection: "HttpConnection") -> None:
        """Note that a request of the connection is in progress."""
        self._waiting.pop(connection, None)

    def end_request(self, connection: "HttpConnection") -> None:
        """Note that the connection waits for its next request."""
        if connection in self._open:
            self._waiting[connection] = None

    def close(self) -> None:
        """Abort all connections, and check no more."""
        self.handshakes.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._waiting.clear()

    def _has_room(self, handshakes: int) -> bool:
        """Whether there may be a TLS handshake beside so many others."""
        if len(self._open) + handshakes < self._most:
            return True
        return handshakes == 0 and self._replace_oldest()

    def _replace_oldest(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self.discard(oldest)
        oldest.abort()
        return True

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [each for each in self._open if each.is_late(now)]:
            self.discard(connection)
            connection.abort()
        self._timer = loop.call_later(HTTP_CHECK_S, self._check) if self._open else None


class HttpConnection(asyncio.Protocol):
    """One HTTP connection: passes bytes on to aiohttp's protocol, and knows since when it waits."""

    def __init__(self, connections: HttpConnections, protocol: asyncio.Protocol) -> None:
        self._connections = connections
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None
        self._requests = 0
        self._head_since: float | None = None
        self._unread_since: float | None = None
        self._refused = False
        self._unreadable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the connection on, or close it above the bound."""
        # Not checked: uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.add(self):
            self._refused = True
            self._transport.abort()
            return
        self._head_since = asyncio.get_running_loop().time()
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; the first ones outside of a request begin the next head."""
        if self._refused or self._unreadable:
            return
        if not self._requests and self._head_since is None:
            self._head_since = asyncio.get_running_loop().time()
        self._protocol.data_received(data)
        # With every further part aiohttp would fail again, and keep that part too.
        self._unreadable = _clear_error(self._protocol)

    def eof_received(self) -> bool | None:
        """Pass the end of the peer's bytes on."""
        return None if self._refused else self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Note since when the peer leaves its answer unread."""
        self._unread_since = asyncio.get_running_loop().time()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Note that the peer reads."""
        self._unread_since = None
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.discard(self)
        self._transport = None
        if not self._refused:
            self._protocol.connection_lost(exc)

    def begin_request(self) -> None:
        """Note that the head of a request has come."""
        self._requests += 1
        self._head_since = None

    def keep_for_request(self) -> None:
        """Let no newcomer replace the connection before its request is answered."""
        self._connections.begin_request(self)

    def end_request(self) -> None:
        """Note that the answer of a request is made."""
        self._requests -= 1
        if not self._requests:
            self._connections.end_request(self)

    def is_late(self, now: float) -> bool:
        """Whether the peer has taken too long for a head, or for reading its answer."""
        head, unread = self._head_since, self._unread_since
        return (head is not None and now - head > HTTP_HEAD_S) or (
            unread is not None and now - unread > HTTP_WRITE_S
        )

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def _clear_error(protocol: asyncio.Protocol) -> bool:
    """Remove received bytes from the error of a request that aiohttp could not read.

    True if there is such an error.  Its text has some of the bytes too, and so perhaps a part of a
    token or password.
    """
    if not isinstance(protocol, RequestHandler) or not protocol._messages:
        return False
    message, _ = protocol._messages[-1]
    if not isinstance(message, _ErrInfo):
        return False
    error = message.exc
    drop_frames(error)
    if isinstance(error, HttpProcessingError):
        error.message = UNREADABLE
    error.args = (UNREADABLE,)
    return True


def connection_of(request: web.Request) -> HttpConnection | None:
    """The connection of a request; None if the server was started without `HttpConnections`."""
    transport = request.transport
    found = transport.get_protocol() if transport is not None else None
    return found if isinstance(found, HttpConnection) else None
