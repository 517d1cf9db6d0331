"""The listening socket of the binary protocol over TLS."""

import asyncio
import ssl
from collections.abc import Callable, Mapping

from broker.wire.connection import ConnectionHost, Handler, SendHandler
from broker.wire.listening import PortSetting
from broker.wire.server import BinaryServer
from broker.wire.tls_stream import TlsStream, new_read_buffer


class TlsBinaryServer(BinaryServer):
    """Listens for connections of the binary protocol over TLS."""

    setting = PortSetting.PORT_TLS

    def __init__(
        self,
        broker: ConnectionHost,
        handlers: Mapping[int, Handler],
        send: SendHandler,
        *,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """`context` returns the context of a new connection."""
        super().__init__(broker, handlers, send)
        self._handshakes = broker.client_addresses.handshakes
        self._context = context
        self._read_buffer = new_read_buffer()

    def _accept(self) -> asyncio.BaseProtocol:
        return TlsStream(
            self._context(),
            self._serve,
            self._handshakes,
            self._broker.peer_memory,
            self._read_buffer,
        )

    async def stop(self) -> None:
        """Accept no more connections, and end handshakes; present connections stay open."""
        await super().stop()
        self._handshakes.close()
