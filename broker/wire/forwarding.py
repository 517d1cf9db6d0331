"""Forwarding of bytes between a client and the broker that it named in CONNECT.

A client reaches a coordinator's leader through any broker of the service URL: it connects there and
names the leader (`proxy_to_broker_url`).
"""

import asyncio
from typing import ClassVar, cast

from broker.placement import BrokerAddress
from broker.placement.dialing import Dialer
from broker.wire.connection import Connection
from broker.wire.protocol_violation import ProtocolViolation
from config.bounds import CLOSE_FLUSH_S, FORWARD_CONNECT_TIMEOUT_S, FORWARD_HIGH_WATER
from magnetar.protocol.frames import encode_command
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandConnect
from magnetar.protocol.server_error import PeerError, ServerError

_FORWARDING = "forwarding"


class BrokerUnreachable(PeerError):
    """The broker that the client named does not answer."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ProxyNotForwarded(PeerError):
    """A proxy with a certificate names another broker: it connects to that one directly."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


async def forward(connection: Connection, request: CommandConnect, target: BrokerAddress) -> None:
    """Hand the connection over to another live broker of this cluster.

    That broker answers the handshake and everything after it; bytes pass unread.  A side that does
    not read stops the other one; when one side ends, so does the other.

    Raises `BrokerUnreachable`, and `ProtocolViolation` if the client did not wait for CONNECTED.
    """
    dialer = connection.broker.placement.dialer
    direct = CommandConnect()
    direct.CopyFrom(request)
    direct.ClearField("proxy_to_broker_url")
    _show_client(connection, direct, dialer)
    connection.pause_reading(_FORWARDING)
    target_side = _TargetConnection(connection)
    try:
        async with asyncio.timeout(FORWARD_CONNECT_TIMEOUT_S):
            await dialer.connect(target, lambda: target_side)
    except OSError as error:  # a timeout is one too, and a certificate that is not trusted
        raise BrokerUnreachable(
            f"{dialer.url_of(target)} cannot be reached from here ({error or 'no answer'}): look "
            "up again."
        ) from error
    if not connection.hand_over(target_side.send):
        target_side.close()
        raise ProtocolViolation("More came before CONNECT was answered: wait for CONNECTED.")
    connection.on_close(target_side.close)
    target_side.send(encode_command(BaseCommand(type=BaseCommand.CONNECT, connect=direct)))
    connection.resume_reading(_FORWARDING)


def _show_client(connection: Connection, direct: CommandConnect, dialer: Dialer) -> None:
    """Have the other broker know the client, whose certificate it does not see.

    Other credentials pass as the client sent them: that broker checks them itself.
    """
    principal = connection.principal
    if principal is None or not principal.by_certificate:
        return
    if principal.proxy is not None:
        raise ProxyNotForwarded(
            "The other broker would not see the proxy's certificate: connect to it directly."
        )
    direct.ClearField("original_auth_data")
    direct.ClearField("original_auth_method")
    proof = dialer.auth_data()
    direct.auth_method_name = proof.auth_method_name
    direct.auth_data = proof.auth_data
    direct.original_principal = principal.role


class _TargetConnection(asyncio.Protocol):
    """The connection to the other broker.

    If that broker stops reading, the connection is aborted: CLOSE_FLUSH_S after the client left, or
    when it has kept the client from being read for two keep-alives.
    """

    def __init__(self, connection: Connection) -> None:
        self._client = connection
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=FORWARD_HIGH_WATER)

    def close(self) -> None:
        """Flush what is queued, for at most CLOSE_FLUSH_S, and end."""
        if not self._closing:
            self._closing = True
            self._abort_in(CLOSE_FLUSH_S)
            self._transport.close()

    def send(self, data: bytes) -> None:
        """Forward bytes of the client."""
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        client = self._client
        client.send_encoded(data)
        if not client.writable and not client.closing:
            self._transport.pause_reading()
            client.on_writable(self._transport.resume_reading)

    def pause_writing(self) -> None:
        self._client.pause_reading(_FORWARDING)
        if not self._closing:
            # While the client is not read, its end is not noticed.
            self._abort_in(2 * self._client.keep_alive_interval_s)

    def resume_writing(self) -> None:
        self._client.resume_reading(_FORWARDING)
        if not self._closing:
            self._cancel_abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._cancel_abort()
        self._client.close("the broker that it was forwarded to has closed")

    def _abort_in(self, delay_s: float) -> None:
        self._cancel_abort()
        self._timer = self._loop.call_later(delay_s, self._transport.abort)

    def _cancel_abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
