"""Bytes both ways between a client and the broker that it named in CONNECT.

Clients of several brokers reach a coordinator's leader through any broker of the service URL:
they connect here and name the leader (`proxy_to_broker_url`).

Rules:

- Only live brokers of this cluster are forwarded to; anything else would be an open relay.
- The far broker answers the handshake, and everything after it; nothing is looked at here.
- A side that does not read stops the other one; when one side ends, so does the other.
- A broker that reads nothing any more (it stands still) does not keep what is queued for it for
  ever: CLOSE_FLUSH_S after the client has gone it is given up, and so it is when it has kept the
  client from being read for two keep-alives.
- What a client sends before the handshake is answered is a violation: it may not be for here.
"""

import asyncio
from typing import ClassVar, cast
from urllib.parse import urlsplit

from broker.placement import BrokerAddress
from broker.wire.connection import Connection
from broker.wire.protocol_violation import ProtocolViolation
from config.bounds import (
    CLOSE_FLUSH_S,
    FORWARD_CONNECT_TIMEOUT_S,
    FORWARD_HIGH_WATER,
    KEEP_ALIVE_S,
)
from magnetar.protocol.frames import encode_command
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandConnect
from magnetar.protocol.server_error import PeerError, ServerError

_FORWARDING = "forwarding"


class BrokerUnreachable(PeerError):
    """The broker that the client named does not answer."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


async def forward(connection: Connection, request: CommandConnect, target: BrokerAddress) -> None:
    """Hand the connection over to another broker.  Raises `BrokerUnreachable`."""
    connection.pause_reading(_FORWARDING)
    address = urlsplit(target.url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(FORWARD_CONNECT_TIMEOUT_S):
            _, far = await loop.create_connection(
                lambda: _FarSide(connection), address.hostname or "", address.port or 0
            )
    except OSError as error:  # a timeout is one too
        raise BrokerUnreachable(
            f"{target.url} cannot be reached from here ({error or 'no answer'}): look up again."
        ) from error
    if not connection.hand_over(far.send):
        far.close()
        raise ProtocolViolation("More came before CONNECT was answered: wait for CONNECTED.")
    connection.on_close(far.close)
    direct = CommandConnect()
    direct.CopyFrom(request)
    direct.ClearField("proxy_to_broker_url")
    far.send(encode_command(BaseCommand(type=BaseCommand.CONNECT, connect=direct)))
    connection.resume_reading(_FORWARDING)


class _FarSide(asyncio.Protocol):
    """The connection to the other broker."""

    def __init__(self, connection: Connection) -> None:
        self._near = connection
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=FORWARD_HIGH_WATER)

    def close(self) -> None:
        """Deliver what is queued, if that can be done in time, and end."""
        if not self._closing:
            self._closing = True
            self._give_up_in(CLOSE_FLUSH_S)
            self._transport.close()

    def send(self, data: bytes) -> None:
        """What the client sent."""
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        near = self._near
        near.send_encoded(data)
        if not near.writable and not near.closing:
            self._transport.pause_reading()
            near.on_writable(self._transport.resume_reading)

    def pause_writing(self) -> None:
        self._near.pause_reading(_FORWARDING)
        if not self._closing:
            # That the client has gone is not noticed while it is not read.
            self._give_up_in(2 * KEEP_ALIVE_S)

    def resume_writing(self) -> None:
        self._near.resume_reading(_FORWARDING)
        if not self._closing:
            self._do_not_give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._do_not_give_up()
        self._near.close("the broker that it was forwarded to has closed")

    def _give_up_in(self, delay_s: float) -> None:
        self._do_not_give_up()
        self._timer = self._loop.call_later(delay_s, self._transport.abort)

    def _do_not_give_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
