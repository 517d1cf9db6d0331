"""Scalable topics: layouts, ordered consumers, namespaces (commands 70 to 78, 82 and 1016).

Errors of lookups, subscriptions and watches are sent inside their own responses.  Closing one that
is not open is no error.
"""

from collections.abc import Mapping
from typing import ClassVar

from broker.scalable.answers import dag_error, subscribe_error, success, topics_error
from broker.topics.subscription_positions import to_wire, told_in
from broker.wire.connection import Connection, Handler
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandSubscriptionPositionsResponse
from magnetar.protocol.server_error import PeerError, ServerError


class ReplicatedSubscriptionsOff(PeerError):
    """The operator has switched replicated subscriptions off."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR

    def __init__(self) -> None:
        super().__init__(
            "Replicated subscriptions are switched off on this broker: set "
            "enable_replicated_subscriptions, or replicate none from the other cluster."
        )


class ScalableTopicsOff(PeerError):
    """The operator has switched scalable topics off."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR

    def __init__(self) -> None:
        super().__init__(
            "Scalable topics are switched off on this broker: set scalable_topics_enabled, or use "
            "persistent:// topics."
        )


def _is_on(connection: Connection) -> bool:
    return connection.broker.settings.scalable_topics_enabled


async def lookup(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SCALABLE_TOPIC_LOOKUP: send the layout, now and at each change."""
    request = command.scalable_topic_lookup
    if not _is_on(connection):
        connection.send(dag_error(request.session_id, ScalableTopicsOff()))
        return
    await connection.broker.scalable.sessions.open(
        connection,
        request.session_id,
        request.topic,
        create_if_missing=request.create_if_missing,
    )


async def close_lookup(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SCALABLE_TOPIC_CLOSE: send no more layouts.  It has no answer.

    It is a task, as the lookup that it closes: that may have come in the same read, and begins
    first.
    """
    if _is_on(connection):
        session_id = command.scalable_topic_close.session_id
        connection.broker.scalable.sessions.close(connection, session_id)
    else:
        connection.reply_error(UNSOLICITED_REQUEST_ID, ScalableTopicsOff())


async def subscribe(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SCALABLE_TOPIC_SUBSCRIBE: register an ordered consumer."""
    request = command.scalable_topic_subscribe
    if not _is_on(connection):
        connection.send(subscribe_error(request.request_id, ScalableTopicsOff()))
        return
    await connection.broker.scalable.controllers.subscribe(connection, request)


async def unsubscribe(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SCALABLE_TOPIC_UNSUBSCRIBE: remove an ordered consumer."""
    request = command.scalable_topic_unsubscribe
    if not _is_on(connection):
        raise ScalableTopicsOff
    await connection.broker.scalable.controllers.unsubscribe(connection, request.consumer_id)
    connection.send(success(request.request_id))


def watch_namespace(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_SCALABLE_TOPICS: send the scalable topics of a namespace, now and as they change."""
    request = command.watch_scalable_topics
    if not _is_on(connection):
        connection.send(topics_error(request.watch_id, ScalableTopicsOff()))
        return
    connection.broker.scalable.namespace_watches.open(
        connection,
        request.watch_id,
        request.namespace,
        [(item.key, item.value) for item in request.property_filters],
        request.current_hash if request.HasField("current_hash") else None,
        connection.costly,
    )


def close_namespace_watch(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """WATCH_SCALABLE_TOPICS_CLOSE: close a watch.  It has no answer."""
    if _is_on(connection):
        watch_id = command.watch_scalable_topics_close.watch_id
        connection.broker.scalable.namespace_watches.close(connection, watch_id)
    else:
        connection.reply_error(UNSOLICITED_REQUEST_ID, ScalableTopicsOff())


async def tell_positions(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SUBSCRIPTION_POSITIONS: another cluster tells how far subscriptions have come there."""
    request = command.subscription_positions
    if not _is_on(connection):
        raise ScalableTopicsOff
    if not connection.broker.settings.enable_replicated_subscriptions:
        raise ReplicatedSubscriptionsOff
    topic, told = parse_topic_name(request.topic), told_in(request)
    left = await connection.broker.scalable.subscription_exchange.answer(topic, told)
    connection.send(
        BaseCommand(
            type=BaseCommand.SUBSCRIPTION_POSITIONS_RESPONSE,
            subscription_positions_response=CommandSubscriptionPositionsResponse(
                request_id=request.request_id,
                incarnation=left.incarnation,
                subscriptions=to_wire(left.first),
                not_replicated=sorted(left.not_replicated),
                late=sorted(left.late),
            ),
        )
    )


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.SCALABLE_TOPIC_LOOKUP: lookup,
    BaseCommand.SCALABLE_TOPIC_CLOSE: close_lookup,
    BaseCommand.SCALABLE_TOPIC_SUBSCRIBE: subscribe,
    BaseCommand.SCALABLE_TOPIC_UNSUBSCRIBE: unsubscribe,
    BaseCommand.WATCH_SCALABLE_TOPICS: watch_namespace,
    BaseCommand.WATCH_SCALABLE_TOPICS_CLOSE: close_namespace_watch,
    BaseCommand.SUBSCRIPTION_POSITIONS: tell_positions,
}
