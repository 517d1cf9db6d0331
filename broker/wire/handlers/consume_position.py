"""Positions and statistics of consumers: SEEK, GET_LAST_MESSAGE_ID, CONSUMER_STATS."""

import asyncio
from datetime import UTC, datetime
from typing import cast

from broker.topics.consumer import Consumer
from broker.topics.dispatch.errors import ConsumerNotAllowed, ConsumerNotFound
from broker.topics.dispatch.start_position import position_of
from broker.topics.topic_stats import consumer_rates
from broker.wire.connection import Connection
from magnetar.protocol.ids import Position, from_wire, to_wire
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandConsumerStatsResponse,
    CommandGetLastMessageIdResponse,
    CommandSuccess,
    MessageIdData,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError


def _consumer(connection: Connection, consumer_id: int) -> Consumer:
    consumer = connection.consumers.get(consumer_id)
    if not isinstance(consumer, Consumer):
        raise ConsumerNotFound(f"There is no consumer {consumer_id}: subscribe first.")
    return consumer


async def seek(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """SEEK: move the subscription to a message id or a publish time, and then answer.

    The message of the id is the first to be delivered; with an ack set, those messages of its
    batch.  Consumers are disconnected before, so that none gets messages of the old position; their
    clients subscribe again by themselves.
    """
    request = command.seek
    consumer = _consumer(connection, request.consumer_id)
    subscription = consumer.subscription
    if request.HasField("message_id"):
        ack_set = list(request.message_id.ack_set)
        await subscription.seek_message(position_of(request.message_id), ack_set)
    elif request.HasField("message_publish_time"):
        since_ms = from_wire(request.message_publish_time)
        await subscription.seek_time(since_ms, compacted=consumer.read_compacted)
    else:
        raise ConsumerNotAllowed("SEEK came without a place: give a message id or a publish time.")
    connection.send(
        BaseCommand(type=BaseCommand.SUCCESS, success=CommandSuccess(request_id=request.request_id))
    )


async def get_last_message_id(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """GET_LAST_MESSAGE_ID: the newest message that consumers get (-1:-1 if there is none).

    A consumer that reads compacted gets no message that compaction removed.  The answer has the
    mark-delete position of the subscription too.
    """
    request = command.get_last_message_id
    consumer = _consumer(connection, request.consumer_id)
    newest = await consumer.subscription.newest_message_of(consumer)
    message_id = _message_id(newest.position, consumer.partition, newest.batch_index)
    connection.send(
        BaseCommand(
            type=BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE,
            get_last_message_id_response=CommandGetLastMessageIdResponse(
                request_id=request.request_id,
                last_message_id=message_id,
                consumer_mark_delete_position=_message_id(newest.mark_delete, -1, -1),
            ),
        )
    )


def _message_id(position: Position, partition: int, batch_index: int) -> MessageIdData:
    message_id = MessageIdData(
        ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id)
    )
    if partition != -1:
        message_id.partition = partition
    if batch_index != -1:
        message_id.batch_index = batch_index
    return message_id


def consumer_stats(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """CONSUMER_STATS: the statistics of a consumer, and the rate of expiry of its subscription."""
    request = command.consumer_stats
    response = CommandConsumerStatsResponse(request_id=request.request_id)
    try:
        _fill_stats(response, _consumer(connection, request.consumer_id))
    except ConsumerNotFound as error:
        # Clients wait for this answer, and for no other one.
        response.error_code = cast("WireError", int(error.code))
        response.error_message = str(error)
    connection.send(
        BaseCommand(type=BaseCommand.CONSUMER_STATS_RESPONSE, consumer_stats_response=response)
    )


def _fill_stats(response: CommandConsumerStatsResponse, consumer: Consumer) -> None:
    now_s = asyncio.get_running_loop().time()
    rates = consumer_rates(consumer, now_s)
    response.msg_rate_out = rates.messages
    response.msg_throughput_out = rates.bytes
    response.msg_rate_redeliver = rates.redelivered
    response.msg_rate_expired = consumer.subscription.expired_per_s(now_s)
    response.message_ack_rate = rates.acknowledged
    response.consumer_name = consumer.name
    response.available_permits = max(consumer.permits, 0)
    response.unacked_messages = consumer.unacked
    response.blocked_consumer_on_unacked_msgs = consumer.blocked_on_unacked
    response.address = consumer.connection.remote
    response.connected_since = _iso(consumer.connected_ms)
    response.type = consumer.type.label
    response.msg_backlog = consumer.subscription.backlog


def _iso(time_ms: int) -> str:
    """A time as Pulsar's statistics write it."""
    seconds = datetime.fromtimestamp(time_ms / 1000, UTC)
    return seconds.isoformat(timespec="milliseconds").replace("+00:00", "Z")
