"""The listening socket of the binary protocol over TLS."""

import asyncio
import ssl
from collections.abc import Callable, Mapping

from broker.wire.connection import ConnectionHost, Handler, SendHandler
from broker.wire.listening import PortSetting
from broker.wire.server import BinaryServer
from broker.wire.tls_handshakes import Handshakes
from broker.wire.tls_stream import TlsStream


class TlsBinaryServer(BinaryServer):
    """Listens for connections of the binary protocol over TLS."""

    setting = PortSetting.PORT_TLS

    def __init__(
        self,
        broker: ConnectionHost,
        handlers: Mapping[int, Handler],
        send: SendHandler,
        *,
        max_connections: int,
        handshakes: Handshakes,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """`context` returns the context of a new connection."""
        super().__init__(
            broker, handlers, send, max_connections=max_connections, handshakes=handshakes
        )
        self._tls_handshakes = handshakes
        self._context = context

    def _accept(self) -> asyncio.Protocol:
        return TlsStream(
            self._context(), super()._accept, self._tls_handshakes, self._broker.peer_memory
        )

    async def stop(self) -> None:
        """Accept no more connections, and end handshakes; present connections stay open."""
        await super().stop()
        self._tls_handshakes.close()
