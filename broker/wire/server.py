"""The listening socket of the binary protocol."""

import asyncio
import socket
from collections.abc import Mapping
from typing import ClassVar

from broker.wire.connection import Connection, ConnectionHost, Handler, SendHandler
from broker.wire.listening import PortSetting, bind_port, explaining_listen_errors
from config.bounds import LISTEN_BACKLOG


class BinaryServer:
    """Listens for connections of the binary protocol.

    One above the bound, for which `ClientAddresses` ends no other one, is closed at once.
    """

    setting: ClassVar[PortSetting] = PortSetting.PORT

    def __init__(
        self,
        broker: ConnectionHost,
        handlers: Mapping[int, Handler],
        send: SendHandler,
    ) -> None:
        self.handlers = handlers
        """The handlers of connections that are accepted from now on."""
        self._broker = broker
        self._send = send
        self._server: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._host = ""
        self.port = 0

    def bind(self, host: str, port: int) -> None:
        """Bind the socket, and set `port` to its port.  Raises `CannotListen`."""
        self._socket = bind_port(host, port, self.setting)
        self._host = host
        self.port = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Accept connections.  Raises `CannotListen`."""
        loop = asyncio.get_running_loop()
        if self._socket is None:
            raise RuntimeError("The server was started before it was bound.")
        # Two processes may have bound the port; only one of them can listen.
        with explaining_listen_errors(self._host, self.port, self.setting):
            self._server = await loop.create_server(
                self._accept, sock=self._socket, backlog=LISTEN_BACKLOG
            )
        self._socket = None

    def _accept(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new socket."""
        return self._serve()

    def _serve(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, which is closed at once above the bound."""
        if self._broker.client_addresses.admits_one():
            return Connection(self._broker, self.handlers, self._send)
        return _RefusedConnection()

    async def stop(self) -> None:
        """Accept no more connections; present ones stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _RefusedConnection(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()
