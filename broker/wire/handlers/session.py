"""CONNECT, PING, PONG."""

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, ClassVar

from broker.placement import BrokerAddress
from broker.wire import forwarding
from broker.wire.connection import Connection, ConnectionState, Handler, ProtocolViolation
from broker.wire.services import BrokerServices
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandConnect,
    CommandConnected,
    CommandPong,
    FeatureFlags,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

if TYPE_CHECKING:
    from broker.wire.login import Login

PROTOCOL_VERSION = 21


class NoProxy(PeerError):
    """`proxy_to_broker_url` names no live broker of this cluster: connect to that one directly."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def features_of(broker: BrokerServices) -> FeatureFlags:
    """The feature flags of this broker."""
    return FeatureFlags(
        supports_topic_watchers=True,
        supports_get_partitioned_metadata_without_auto_creation=True,
        supports_repl_dedup_by_lid_and_eid=True,
        supports_topic_watcher_reconcile=True,
        supports_scalable_topics=broker.settings.scalable_topics_enabled,
        supports_tc_metadata_discovery=broker.settings.transactions_enabled,
    )


def connect(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """CONNECT: agree on the protocol version (the lower one of both) and exchange features.

    A `proxy_to_broker_url` that names another live broker of this cluster has the connection
    forwarded there.
    """
    request = command.connect
    if connection.state is not ConnectionState.HANDSHAKE:
        raise ProtocolViolation("CONNECT came twice: send it once, first.")
    login = connection.authenticate()
    return (
        _serve_client(connection, request) if login is None else _log_in(connection, request, login)
    )


async def _log_in(connection: Connection, request: CommandConnect, login: "Login") -> None:
    try:
        await login.log_in(request)
    except MagnetarError as error:
        if not login.failure_logged:
            raise
        _refuse(connection, error)
        return
    work = None if connection.closing else _serve_client(connection, request)
    if work is not None:
        await work


def _serve_client(connection: Connection, request: CommandConnect) -> Awaitable[None] | None:
    """Answer CONNECTED, or have the connection forwarded."""
    target, placement = request.proxy_to_broker_url, connection.broker.placement
    if target and not _is_address_of(placement.me, target):
        if placement.draining:
            raise forwarding.BrokerUnreachable(
                "This broker stops, and forwards nothing more: connect through another one."
            )
        # Forwarding to any other address would make this broker an open relay.
        for each in placement.brokers.values():
            if _is_address_of(each, target):
                return forwarding.forward(connection, request, each)
        raise NoProxy(
            f"{target!r} is no live broker of this cluster, so nothing is "
            "forwarded there: connect to that one directly, or look up again."
        )
    connection.client_version = request.client_version
    connection.protocol_version = min(request.protocol_version, PROTOCOL_VERSION)
    connection.features = request.feature_flags
    connection.ready()
    connection.send(
        BaseCommand(
            type=BaseCommand.CONNECTED,
            connected=CommandConnected(
                server_version=connection.server_version,
                protocol_version=connection.protocol_version,
                max_message_size=connection.broker.max_message_size,
                feature_flags=features_of(connection.broker),
                transaction_keys=connection.broker.settings.transactions_enabled,
                transaction_groups=connection.broker.settings.transactions_enabled,
                segment_reads=True,
                segment_replication=True,
                replicated_segment_subscriptions=(
                    connection.broker.settings.enable_replicated_subscriptions
                ),
            ),
        )
    )
    return None


def _is_address_of(broker: BrokerAddress, target: str) -> bool:
    """Whether `host:port` is one of a broker's two addresses."""
    # A client names the address that a lookup gave it, which is that with TLS if it uses TLS.
    return f"pulsar://{target}" == broker.url or f"pulsar+ssl://{target}" == broker.url_tls


async def auth_response(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """AUTH_RESPONSE: take new credentials of the same role, after AUTH_CHALLENGE."""
    if connection.login is None:
        raise ProtocolViolation("AUTH_RESPONSE came without a challenge: wait for one.")
    try:
        await connection.login.refresh(command.auth_response)
    except ProtocolViolation:
        raise
    except MagnetarError as error:
        _refuse(connection, error)


def _refuse(connection: Connection, error: MagnetarError) -> None:
    """End a connection for a reason that the log has already."""
    connection.reply_error(UNSOLICITED_REQUEST_ID, error)
    connection.close(str(error))


def ping(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """PING: answer at once."""
    connection.send(BaseCommand(type=BaseCommand.PONG, pong=CommandPong()))


def pong(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """PONG: end the wait for it."""
    connection.pong()


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.CONNECT: connect,
    BaseCommand.AUTH_RESPONSE: auth_response,
    BaseCommand.PING: ping,
    BaseCommand.PONG: pong,
}
