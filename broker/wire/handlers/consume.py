"""Consumers: SUBSCRIBE, FLOW, ACK, REDELIVER_UNACKNOWLEDGED_MESSAGES, UNSUBSCRIBE, CLOSE_CONSUMER.

FLOW and REDELIVER, and an ACK without a request id, are dropped if their consumer is still being
opened, or closed: they often cross CLOSE_CONSUMER and seeks.  But an ACK that comes just behind the
client's CLOSE_CONSUMER is taken: see `broker.topics.closed_consumers`.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, cast

import structlog

from broker.topics.client_metadata import metadata_of, subscription_properties_of
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.consumer import (
    Ack,
    ConsumedSubscription,
    Consumer,
    KeySharedMode,
    KeySharedPolicy,
    SubscribeRequest,
    SubscriptionType,
)
from broker.topics.dispatch.errors import (
    ConsumerBusy,
    ConsumerNotAllowed,
    ConsumerNotFound,
    SubscriptionUnavailable,
)
from broker.topics.dispatch.start_position import position_of
from broker.topics.schemas import definition_from_wire, is_large
from broker.transactions.own_transactions import OwnTransactions
from broker.wire.connection import Connection, Deferred, Handler, ProtocolViolation
from broker.wire.handlers import consume_position
from config.bounds import (
    ACKED_AT_ONCE,
    CONSUMER_METADATA_BYTES,
    DAMAGED_POSITIONS_LOGGED,
    MAX_FLOW_PERMITS,
)
from magnetar.protocol.ack_set import MAX_BATCH_SIZE, from_words
from magnetar.protocol.ids import Position, from_wire
from magnetar.protocol.names import TopicDomain, parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    STICKY,
    BaseCommand,
    CommandAck,
    CommandAckResponse,
    CommandRedeliverUnacknowledgedMessages,
    CommandSubscribe,
    CommandSuccess,
    KeySharedMeta,
    MessageIdData,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from txn.pending_ack import ALL_MESSAGES

log = structlog.get_logger(__name__)
_CUMULATIVE: Final = int(CommandAck.Cumulative)
_NO_ACK_SET: Final = ()
_COMPACTED_READERS: Final = (CommandSubscribe.Exclusive, CommandSubscribe.Failover)
"""Types of subscriptions that may read compacted."""


# SUBSCRIBE


def subscribe(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """SUBSCRIBE: take the id at once, and open the consumer in a task; SUCCESS when it is attached.

    A CLOSE_CONSUMER that comes in the same read finds the id taken, and cancels that task.
    """
    request = command.subscribe
    consumer_id = request.consumer_id
    known = connection.consumers.get(consumer_id)
    if isinstance(known, Consumer):
        _succeed(connection, request.request_id)
        return None
    if known is not None:
        raise SubscriptionUnavailable(
            f"Consumer {consumer_id} is being opened on this connection: wait for the answer."
        )
    connection.closed_consumers.forget(consumer_id)
    opening = asyncio.get_running_loop().create_task(_open(connection, request))
    connection.consumers[consumer_id] = opening
    answering = asyncio.get_running_loop().create_task(_answer(connection, consumer_id, opening))
    # The end of the connection may cancel it before it begins.
    answering.add_done_callback(lambda _: opening.cancel())
    return answering


async def _answer(
    connection: Connection, consumer_id: int, opening: "asyncio.Task[Consumer]"
) -> None:
    """Return when the consumer is open; raise what SUBSCRIBE is answered with."""
    try:
        await opening
    except asyncio.CancelledError:
        if connection.closing or not opening.cancelled():
            opening.cancel()
            raise
        raise SubscriptionUnavailable(
            f"Consumer {consumer_id} was closed while it was being opened: subscribe again."
        ) from None
    finally:
        if connection.consumers.get(consumer_id) is opening:
            del connection.consumers[consumer_id]


async def _open(connection: Connection, request: CommandSubscribe) -> Consumer:
    """Serve SUBSCRIBE, from the name to SUCCESS.  CLOSE_CONSUMER cancels this task."""
    broker = connection.broker
    _require_served(request)
    name = parse_topic_name(request.topic)
    topic = await broker.topics.serve(name, create=request.force_topic_creation)
    if request.HasField("schema"):
        policies = topic.policies
        definition = definition_from_wire(request.schema)
        async with connection.costly_if(is_large(definition)):
            await broker.schemas.check_consumer(
                name.schema_id,
                definition,
                policies.schema_compatibility,
                may_add=policies.adds_schemas,
            )
    start = await topic.start_of(request, broker.scalable.inherits_subscription)
    consumer = await topic.subscribe(_subscribe_request_of(connection, request, start))
    if consumer.closed:
        raise SubscriptionUnavailable(
            f"Subscription {request.subscription!r} was closed just now: subscribe again."
        )
    connection.consumers[request.consumer_id] = consumer
    _succeed(connection, request.request_id)
    # Before SUCCESS the client could not take in which consumer is active, or the topic's end.
    consumer.opened()
    return consumer


def _require_served(request: CommandSubscribe) -> None:
    """Raise `ConsumerNotAllowed` for options that no subscription here has."""
    if not request.subscription.strip():
        raise ConsumerNotAllowed("SUBSCRIBE came without a subscription name: give one.")
    require_of_clients(request.subscription)
    if request.read_compacted and request.sub_type not in _COMPACTED_READERS:
        raise ConsumerNotAllowed(
            "readCompacted needs a subscription with one active consumer: subscribe as Exclusive "
            "or Failover, or without it."
        )
    if request.read_compacted and parse_topic_name(request.topic).domain is TopicDomain.SEGMENT:
        raise ConsumerNotAllowed(
            "Scalable topics are not compacted: read a segment without readCompacted."
        )
    meta = request.key_shared_meta
    if meta.entryBucketDispatch and not (
        request.sub_type == CommandSubscribe.Key_Shared and meta.key_shared_mode == STICKY
    ):
        raise ConsumerNotAllowed(
            "entryBucketDispatch needs a Key_Shared subscription with STICKY hash ranges: "
            "subscribe with these, or without it."
        )


def _subscribe_request_of(
    connection: Connection, request: CommandSubscribe, start: Position
) -> SubscribeRequest:
    kind = SubscriptionType(request.sub_type)
    return SubscribeRequest(
        connection=connection,
        consumer_id=request.consumer_id,
        subscription=request.subscription,
        type=kind,
        consumer_name=request.consumer_name or f"{connection.remote}-{request.consumer_id}",
        durable=request.durable,
        start=start,
        priority_level=request.priority_level,
        consumer_epoch=max(from_wire(request.consumer_epoch), 0),
        key_shared=_policy(request.key_shared_meta),
        read_compacted=request.read_compacted,
        properties=subscription_properties_of(request.subscription_properties),
        metadata=metadata_of(request.metadata, CONSUMER_METADATA_BYTES, "A consumer"),
        replicated=request.replicate_subscription_state,
    )


def _policy(meta: KeySharedMeta) -> KeySharedPolicy:
    return KeySharedPolicy(
        mode=KeySharedMode(meta.key_shared_mode),
        allow_out_of_order=meta.allow_out_of_order_delivery,
        ranges=tuple((item.start, item.end) for item in meta.hash_ranges),
        entry_buckets=meta.entryBucketDispatch,
    )


# FLOW, ACK, REDELIVER


def flow(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """FLOW: add permits.  Raises `ProtocolViolation` for none and for more than an int32 holds."""
    request = command.flow
    if not 0 < request.message_permits <= MAX_FLOW_PERMITS:
        raise ProtocolViolation(
            f"FLOW has {request.message_permits} permits: send 1 to {MAX_FLOW_PERMITS}."
        )
    consumer = connection.consumers.get(request.consumer_id)
    if isinstance(consumer, Consumer):
        consumer.flow(request.message_permits)


def acknowledge(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> Coroutine[None, None, None] | None:
    """ACK, individual or cumulative.  With a request id it is answered once it is durable."""
    ack = command.ack
    if len(ack.message_id) > ACKED_AT_ONCE and ack.ack_type != _CUMULATIVE:
        serve = _hold_in_slices if _is_in_transaction(ack) else _acknowledge_in_slices
        raise Deferred(partial(serve, connection, ack))
    consumer = connection.consumers.get(ack.consumer_id)
    if not isinstance(consumer, Consumer):
        return _acknowledge_late(connection, ack)
    wants_answer = ack.HasField("request_id")
    try:
        _require_no_properties(ack)
        if ack.HasField("validation_error"):
            _log_damage(connection, consumer, ack, ack.message_id)
        if _is_in_transaction(ack):
            # The messages are held in this turn of the loop, so that later commands find them held.
            # It is a request in progress until that is durable, with or without an answer.
            return _answer_when_held(connection, ack, _hold(connection, consumer, command))
        _apply(consumer, ack)
    except MagnetarError as error:
        if wants_answer:
            _ack_response(connection, ack, error)
        return None
    return _answer_when_durable(connection, consumer.subscription, ack) if wants_answer else None


def _require_no_properties(ack: CommandAck) -> None:
    """Raise `ConsumerNotAllowed` for an acknowledgement with properties."""
    # Apache Pulsar's compactor stores its position so.  Dropped, its sender would miss them later.
    if ack.properties:
        raise ConsumerNotAllowed(
            "An acknowledgement came with properties, which are not stored with a position here: "
            "acknowledge without them."
        )


def _is_in_transaction(ack: CommandAck) -> bool:
    return ack.HasField("txnid_least_bits") or ack.HasField("txnid_most_bits")


async def _acknowledge_in_slices(connection: Connection, ack: CommandAck) -> Awaitable[None] | None:
    """Serve an individual ACK of many messages, ACKED_AT_ONCE in a turn of the loop."""
    ids, subscription = ack.message_id, None
    try:
        _require_no_properties(ack)
        for start in range(0, len(ids), ACKED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            # The consumer may have been disconnected meanwhile, say by a seek.
            subscription = _apply_slice(connection, ack, ids[start : start + ACKED_AT_ONCE])
    except MagnetarError as error:
        if ack.HasField("request_id"):
            _ack_response(connection, ack, error)
        return None
    if subscription is None or not ack.HasField("request_id"):
        return None
    return _answer_when_durable(connection, subscription, ack)


async def _hold_in_slices(connection: Connection, ack: CommandAck) -> Awaitable[None] | None:
    """Serve an individual ACK of many messages in a transaction, a slice in a turn of the loop.

    Returns when all are held, so that later commands of the connection find them held.
    """
    ids = ack.message_id
    try:
        _require_no_properties(ack)
        consumer = connection.consumers.get(ack.consumer_id)
        if not isinstance(consumer, Consumer):
            raise _no_consumer(ack)
        if ack.HasField("validation_error"):
            _log_damage(connection, consumer, ack, ids)
        txn, own = _transaction_of(connection, ack), connection.own_transactions
        refusal = None if own is None or own.is_own(txn) else await own.refusal_of_ack(txn)
        if refusal is not None:
            raise refusal
        acks: list[Ack] = []
        for start in range(0, len(ids), ACKED_AT_ONCE):
            acks += _acks_of(ids[start : start + ACKED_AT_ONCE])
            await asyncio.sleep(0)
        held = await consumer.subscription.acknowledge_many_in(consumer, txn, acks)
    except MagnetarError as error:
        if ack.HasField("request_id"):
            _ack_response(connection, ack, error)
        return None
    return _answer_when_held(connection, ack, held)


def _apply_slice(
    connection: Connection, ack: CommandAck, ids: Sequence[MessageIdData]
) -> ConsumedSubscription:
    """Acknowledge some messages of an individual ACK.  Raises as `_apply_late`."""
    consumer = connection.consumers.get(ack.consumer_id)
    if not isinstance(consumer, Consumer):
        return _apply_late(connection, ack, ids)
    if ack.HasField("validation_error"):
        _log_damage(connection, consumer, ack, ids)
    consumer.subscription.acknowledge(consumer, _acks_of(ids))
    return consumer.subscription


def _log_damage(
    connection: Connection, consumer: Consumer, ack: CommandAck, ids: Sequence[MessageIdData]
) -> None:
    """Log that a client could not read messages, and acknowledges them to have no more of them."""
    # One line, and the first positions: clients send one, but may send as many as fit in a frame.
    log.warning(
        "message_damaged_at_client",
        topic=str(consumer.subscription.topic_name),
        subscription=consumer.subscription.name,
        messages=len(ids),
        positions=[(item.ledger_id, item.entry_id) for item in ids[:DAMAGED_POSITIONS_LOGGED]],
        error=CommandAck.ValidationError.Name(ack.validation_error),
        remote=connection.remote,
    )


def _acknowledge_late(
    connection: Connection, ack: CommandAck
) -> Coroutine[None, None, None] | None:
    """Serve the ACK of a consumer that was closed just before, on the same connection."""
    try:
        subscription = _apply_late(connection, ack, ack.message_id)
    except MagnetarError as error:
        if ack.HasField("request_id"):
            _ack_response(connection, ack, error)
        return None
    if not ack.HasField("request_id"):
        return None
    return _answer_when_durable(connection, subscription, ack)


async def _acknowledge_if_own(
    connection: Connection, command: BaseCommand, own: OwnTransactions, txn: TxnId
) -> Awaitable[None] | None:
    """Serve an ACK once its transaction is found to be the client's own; else refuse it."""
    refusal = await own.refusal_of_ack(txn)
    if refusal is None:
        return None if connection.closing else acknowledge(connection, command, None)
    if command.ack.HasField("request_id"):
        _ack_response(connection, command.ack, refusal)
    return None


def _apply(consumer: Consumer, ack: CommandAck) -> None:
    if ack.ack_type == _CUMULATIVE:
        last = _last_of(ack)
        consumer.subscription.acknowledge_up_to(consumer, position_of(last), list(last.ack_set))
        return
    consumer.subscription.acknowledge(consumer, _acks_of(ack.message_id))


def _apply_late(
    connection: Connection, ack: CommandAck, ids: Sequence[MessageIdData]
) -> ConsumedSubscription:
    """Acknowledge these messages for a closed consumer, and return its subscription.

    Raises `ConsumerNotFound` without such a consumer, and in a transaction: that would hold
    messages which the next consumer may have by now.
    """
    _require_no_properties(ack)
    now_s = asyncio.get_running_loop().time()
    closed = connection.closed_consumers.get(ack.consumer_id, now_s)
    subscription = None if closed is None else closed.subscription
    if closed is None or subscription is None or _is_in_transaction(ack):
        raise _no_consumer(ack)
    if ack.ack_type == _CUMULATIVE:
        last = _last_of(ack)
        position = position_of(last)
        subscription.acknowledge_late_up_to(closed.type, position, list(last.ack_set))
    else:
        subscription.acknowledge(None, _acks_of(ids))
    return subscription


def _no_consumer(ack: CommandAck) -> ConsumerNotFound:
    return ConsumerNotFound(f"There is no consumer {ack.consumer_id}: subscribe again.")


def _last_of(ack: CommandAck) -> MessageIdData:
    """The message id of a cumulative acknowledgement.  Raises `ConsumerNotAllowed`."""
    if len(ack.message_id) != 1:
        raise ConsumerNotAllowed(
            f"A cumulative acknowledgement came with {len(ack.message_id)} message ids: "
            "send exactly one."
        )
    (last,) = ack.message_id
    return last


def _acks_of(ids: Sequence[MessageIdData]) -> list[Ack]:
    return [
        (
            Position(item.ledger_id, item.entry_id),
            list(item.ack_set) if item.ack_set else _NO_ACK_SET,
            item.batch_size,
        )
        for item in ids
    ]


def _hold(connection: Connection, consumer: Consumer, command: BaseCommand) -> asyncio.Task[None]:
    """Acknowledge when the transaction commits; the task ends when the messages are held."""
    ack, own = command.ack, connection.own_transactions
    txn = _transaction_of(connection, ack)
    if own is not None and not own.is_own(txn):
        raise Deferred(partial(_acknowledge_if_own, connection, command, own, txn))
    cumulative = ack.ack_type == _CUMULATIVE
    return consumer.subscription.acknowledge_in(
        consumer, txn, _acks_of(ack.message_id), cumulative=cumulative
    )


def _transaction_of(connection: Connection, ack: CommandAck) -> TxnId:
    """The transaction of an ACK.  Raises `ConsumerNotAllowed` where there are none."""
    if not connection.broker.transactions.enabled:
        raise ConsumerNotAllowed(
            "Transactions are not enabled on this broker: acknowledge without one."
        )
    return TxnId(ack.txnid_most_bits, ack.txnid_least_bits)


async def _answer_when_held(
    connection: Connection, ack: CommandAck, held: asyncio.Task[None]
) -> None:
    refusal: MagnetarError | None = None
    try:
        await asyncio.shield(held)
    except MagnetarError as error:
        refusal = error
    if ack.HasField("request_id"):
        _ack_response(connection, ack, refusal)


async def _answer_when_durable(
    connection: Connection, subscription: ConsumedSubscription, ack: CommandAck
) -> None:
    try:
        await subscription.persist()
    except MagnetarError as error:
        _ack_response(connection, ack, error)
    else:
        _ack_response(connection, ack, None)


def _ack_response(connection: Connection, ack: CommandAck, error: MagnetarError | None) -> None:
    response = CommandAckResponse(consumer_id=ack.consumer_id, request_id=ack.request_id)
    if ack.HasField("txnid_most_bits"):
        response.txnid_most_bits = ack.txnid_most_bits
        response.txnid_least_bits = ack.txnid_least_bits
    if error is not None:
        response.error = cast("WireError", int(error.code))
        response.message = str(error)
    connection.send(BaseCommand(type=BaseCommand.ACK_RESPONSE, ack_response=response))


def redeliver(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """REDELIVER_UNACKNOWLEDGED_MESSAGES: send the named entries again, or all unacknowledged."""
    request = command.redeliver_unacknowledged_messages
    if len(request.message_ids) > ACKED_AT_ONCE:
        raise Deferred(partial(_redeliver_many, connection, request))
    messages: dict[Position, int] = {}
    _add_requested(messages, request.message_ids)
    _redeliver(connection, request, messages or None)


async def _redeliver_many(
    connection: Connection, request: CommandRedeliverUnacknowledgedMessages
) -> None:
    """Serve a request for many messages: ACKED_AT_ONCE are read in a turn of the loop."""
    ids, messages = request.message_ids, dict[Position, int]()
    for start in range(0, len(ids), ACKED_AT_ONCE):
        _add_requested(messages, ids[start : start + ACKED_AT_ONCE])
        await asyncio.sleep(0)
    _redeliver(connection, request, messages)


def _redeliver(
    connection: Connection,
    request: CommandRedeliverUnacknowledgedMessages,
    messages: dict[Position, int] | None,
) -> None:
    consumer = connection.consumers.get(request.consumer_id)
    if isinstance(consumer, Consumer):
        epoch = from_wire(request.consumer_epoch) if request.HasField("consumer_epoch") else None
        consumer.subscription.redeliver(consumer, messages, epoch)


def _add_requested(messages: dict[Position, int], ids: Sequence[MessageIdData]) -> None:
    for item in ids:
        position = Position(item.ledger_id, item.entry_id)
        messages[position] = messages.get(position, 0) | _requested_messages(item)


def _requested_messages(item: MessageIdData) -> int:
    """The messages of an entry that a client requests: its `ack_set`, or all."""
    words = item.ack_set[: MAX_BATCH_SIZE // 64]
    return from_words(words, len(words) * 64) if words else ALL_MESSAGES


# UNSUBSCRIBE, CLOSE_CONSUMER


async def unsubscribe(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """UNSUBSCRIBE: delete the subscription of a consumer and its cursor."""
    request = command.unsubscribe
    consumer = connection.consumers.get(request.consumer_id)
    if not isinstance(consumer, Consumer):
        raise ConsumerNotFound(f"There is no consumer {request.consumer_id}: subscribe first.")
    subscription = consumer.subscription
    others = len(subscription.consumers) - 1
    if others > 0 and not request.force:
        raise ConsumerBusy(
            f"Subscription {subscription.name!r} has {others} more consumers: close them first, "
            "or unsubscribe with force."
        )
    consumer.close()
    if subscription.durable:
        try:
            await subscription.delete(force=request.force)
        except MagnetarError as error:
            # After the error its client takes the consumer for attached: have it subscribe again.
            connection.reply_error(request.request_id, error)
            consumer.disconnect()
            return
    _succeed(connection, request.request_id)


def close_consumer(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """CLOSE_CONSUMER: detach a consumer, or cancel its SUBSCRIBE in progress.

    Its unacknowledged messages go to others.  It is answered even if there is no such consumer.
    """
    request = command.close_consumer
    consumer = connection.consumers.pop(request.consumer_id, None)
    if isinstance(consumer, Consumer):
        connection.closed_consumers.add(consumer, asyncio.get_running_loop().time())
        consumer.close()
    elif consumer is not None:
        consumer.cancel()
    _succeed(connection, request.request_id)


def _succeed(connection: Connection, request_id: int) -> None:
    connection.send(
        BaseCommand(type=BaseCommand.SUCCESS, success=CommandSuccess(request_id=request_id))
    )


HANDLERS: Mapping[int, Handler] = MappingProxyType(
    {
        BaseCommand.SUBSCRIBE: subscribe,
        BaseCommand.FLOW: flow,
        BaseCommand.ACK: acknowledge,
        BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES: redeliver,
        BaseCommand.UNSUBSCRIBE: unsubscribe,
        BaseCommand.CLOSE_CONSUMER: close_consumer,
        BaseCommand.SEEK: consume_position.seek,
        BaseCommand.GET_LAST_MESSAGE_ID: consume_position.get_last_message_id,
        BaseCommand.CONSUMER_STATS: consume_position.consumer_stats,
    }
)
