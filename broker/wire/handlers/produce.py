"""Producers: PRODUCER, SEND, CLOSE_PRODUCER."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from broker.topics.client_metadata import metadata_of
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.producer_access import AccessMode
from broker.topics.publish_errors import MessageRefused
from broker.topics.received_parts import ReceivedParts
from broker.topics.schemas import (
    definition_from_wire,
    is_large,
    may_add_schema,
    version_bytes,
)
from broker.topics.segment_sources import SourceRefused, SourceState
from broker.topics.served_topic import ServedTopic
from broker.topics.source_positions import REPLICATOR_PREFIX, source_cluster_of
from broker.wire.connection import Connection, Handler
from broker.wire.protocol_violation import ProtocolViolation
from config.bounds import METADATA_KEY_BYTES, PRODUCER_METADATA_BYTES
from magnetar.protocol.frame_error import ReplicatorOnly
from magnetar.protocol.frames import Received, Send
from magnetar.protocol.ids import from_wire, to_wire
from magnetar.protocol.managed_clients import is_managed
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandProducer,
    CommandProducerSuccess,
    CommandSuccess,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

Opening = asyncio.Future[Producer]


class ProducerOpening(PeerError):
    """The id is taken by a PRODUCER in progress: wait for its answer."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ProducerNameTooLong(PeerError):
    """The name is longer than names are stored."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class NoReplicas(PeerError):
    """A replicator does not say by which segment of its cluster it publishes to a segment here."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def producer(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """PRODUCER: take the id at once, and open the producer in a task.

    The id has a future until the producer is open.  A second PRODUCER for the id is refused
    meanwhile, and is answered like the first one afterwards.
    """
    request = command.producer
    known = connection.producers.get(request.producer_id)
    if isinstance(known, Producer):
        _succeed(connection, request.request_id, known, ready=True)
        return None
    if known is not None:
        raise ProducerOpening(
            f"Producer {request.producer_id} is being opened on this connection: wait for it."
        )
    opening: Opening = asyncio.get_running_loop().create_future()
    connection.producers[request.producer_id] = opening
    return _open(connection, request, opening)


async def _open(connection: Connection, request: CommandProducer, opening: Opening) -> None:
    """Attach the producer and answer, unless CLOSE_PRODUCER cancels `opening` first."""
    task = asyncio.current_task()
    if opening.cancelled() or task is None:
        return
    # CLOSE_PRODUCER cancels `opening`: then PRODUCER is not answered, and the close is.
    opening.add_done_callback(lambda future: future.cancelled() and task.cancel())
    try:
        attached = await _attach(request, connection)
    except asyncio.CancelledError:
        if connection.closing or not opening.cancelled():
            raise
        return
    except BaseException:
        if connection.producers.get(request.producer_id) is opening:
            del connection.producers[request.producer_id]
        raise
    if opening.cancelled():
        # The last step of the open and CLOSE_PRODUCER came in the same turn of the loop, so there
        # was nothing left to cancel.
        attached.close_at_once()
        return
    if attached.ready is None:
        _answer_open(connection, request, attached)
        return
    _succeed(connection, request.request_id, attached, ready=False)
    opening.add_done_callback(lambda _: attached.close_at_once())
    attached.ready.add_done_callback(
        lambda ready: _end_waiting(connection, request, opening, attached, ready.exception())
    )


def _end_waiting(
    connection: Connection,
    request: CommandProducer,
    opening: Opening,
    attached: Producer,
    error: BaseException | None,
) -> None:
    """Answer a producer that waited to be exclusive: it is so now, or will never be."""
    if connection.producers.get(request.producer_id) is not opening:
        return
    if error is None:
        _answer_open(connection, request, attached)
        return
    del connection.producers[request.producer_id]
    if isinstance(error, MagnetarError):
        connection.reply_error(request.request_id, error)


def _answer_open(connection: Connection, request: CommandProducer, attached: Producer) -> None:
    connection.producers[request.producer_id] = attached
    connection.closed_producers.pop(request.producer_id, None)
    _succeed(connection, request.request_id, attached, ready=True)


async def _attach(request: CommandProducer, connection: Connection) -> Producer:
    name = parse_topic_name(request.topic)
    if len(request.producer_name.encode()) > METADATA_KEY_BYTES:
        raise ProducerNameTooLong(
            f"A producer was named with {len(request.producer_name)} characters, and "
            f"{METADATA_KEY_BYTES} bytes are the most: give it a shorter name."
        )
    source = _source_of(request, name)
    topic = await connection.broker.topics.serve(name, create=True)
    wanted = replace(_request_of(request, connection), source=source)
    topic.require_open(wanted)
    await topic.require_room()
    version = await _schema_version(connection, topic, request)
    if request.initial_subscription_name:
        await topic.create_initial_subscription(request.initial_subscription_name)
    return await topic.add_producer(replace(wanted, schema_version=version))


def _source_of(request: CommandProducer, name: TopicName) -> SourceState | None:
    """What the sender of another cluster's segment says; None for any other producer.

    Raises `NoReplicas`, `SourceRefused`.
    """
    of_replicator = source_cluster_of(request.producer_name) is not None
    if request.HasField("source_state"):
        if name.domain is not TopicDomain.SEGMENT or not of_replicator:
            raise SourceRefused(
                f"`source_state` came with producer {request.producer_name!r:.100} of {name}: it "
                f"is for names that begin with {REPLICATOR_PREFIX!r}, on segments."
            )
        return SourceState.from_wire(request.producer_name, request.source_state)
    if name.domain is TopicDomain.SEGMENT and of_replicator:
        raise NoReplicas(
            f"{request.producer_name!r} is the name of a replicator, and {name} is a segment of a "
            "scalable topic, which takes those that send `source_state`: use a name that does not "
            f"begin with {REPLICATOR_PREFIX!r}, or replicate an ordinary topic."
        )
    return None


def _request_of(request: CommandProducer, connection: Connection) -> ProducerRequest:
    return ProducerRequest(
        connection=connection,
        producer_id=request.producer_id,
        name=request.producer_name,
        user_provided_name=bool(request.producer_name) and request.user_provided_producer_name,
        epoch=request.epoch,
        access_mode=AccessMode(request.producer_access_mode),
        topic_epoch=from_wire(request.topic_epoch) if request.HasField("topic_epoch") else None,
        properties=metadata_of(request.metadata, PRODUCER_METADATA_BYTES, "A producer"),
        own_transactions=connection.own_transactions,
        request_id=request.request_id,
        encrypted=request.encrypted,
    )


async def _schema_version(
    connection: Connection, topic: ServedTopic, request: CommandProducer
) -> bytes:
    """The version of the producer's schema, added to the topic's history if it may be."""
    policies, schemas = topic.policies, connection.broker.schemas
    if not request.HasField("schema"):
        if policies.requires_schema:
            await schemas.require_none(topic.name.schema_id)
        return b""
    definition = definition_from_wire(request.schema)
    async with connection.costly_if(is_large(definition)):
        version = await schemas.add(
            topic.name.schema_id,
            definition,
            policies.schema_compatibility,
            may_add=may_add_schema(policies, request.producer_name),
        )
    return b"" if version is None else version_bytes(version)


def _succeed(connection: Connection, request_id: int, attached: Producer, *, ready: bool) -> None:
    success = CommandProducerSuccess(
        request_id=request_id,
        producer_name=attached.name,
        last_sequence_id=attached.last_sequence_id,
        schema_version=attached.request.schema_version,
        producer_ready=ready,
    )
    if isinstance(attached.replicated, ReceivedParts) and attached.replicated.told is not None:
        success.replicated_ranges.extend(attached.replicated.told.to_wire())
    if attached.topic_epoch is not None:
        success.topic_epoch = to_wire(attached.topic_epoch)
    connection.send(BaseCommand(type=BaseCommand.PRODUCER_SUCCESS, producer_success=success))


def send(connection: Connection, frames: Sequence[Received], at: int) -> int:
    """SEND, the hot path: publish frames[at], with those behind it that can be published with it.

    Returns the index behind the last one.  Raises `ProtocolViolation` if the producer is not open.
    """
    request = cast("Send", frames[at])
    attached = connection.producers.get(request.producer_id)
    if isinstance(attached, Producer):
        if request.plain:
            return attached.topic.publish(attached, frames, at)
        if isinstance(request.error, ReplicatorOnly):
            # Message ids are for shadow topics, which are not served.
            attached.topic.refuse(attached, request, request.error)
        elif request.marker and attached.replicated is None:
            attached.topic.refuse(attached, request, _marker_refused())
        elif request.entry is None:
            attached.topic.damaged(attached, request)
        elif request.txnid is not None and not connection.broker.transactions.enabled:
            attached.topic.refuse(
                attached, request, MessageRefused("Transactions are off: send without one.")
            )
        else:
            return attached.topic.publish(attached, frames, at)
    elif request.producer_id not in connection.closed_producers:
        # SENDs for a producer that was closed a while ago are dropped: they were on their way.
        raise ProtocolViolation(
            f"SEND names producer {request.producer_id}, which is not open: wait for "
            "PRODUCER_SUCCESS first."
        )
    return at + 1


def _marker_refused() -> ReplicatorOnly:
    return ReplicatorOnly(
        "The SEND is a marker, which only replicators of other clusters send, to topics that store "
        "their messages: send messages."
    )


def close_producer(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """CLOSE_PRODUCER: cancel an open in progress, or close the producer.

    It is answered when all earlier SENDs are durable and have their receipts, and at once if there
    is no such producer.
    """
    request = command.close_producer
    known = connection.producers.get(request.producer_id)
    if isinstance(known, Producer):
        return _close(connection, request.request_id, known)
    if known is not None:
        known.cancel()
        del connection.producers[request.producer_id]
        connection.remember_closed(request.producer_id)
    _succeed_close(connection, request.request_id)
    return None


def _close(connection: Connection, request_id: int, attached: Producer) -> Awaitable[None]:
    """Stop taking SENDs: in this turn of the loop already, unless more may be on their way."""
    # Pulsar's Java client closes a segment's producer when it gets a newer layout, which may be
    # before the segment's broker learns of the seal.  It writes CLOSE_PRODUCER ahead of SENDs that
    # it has queued already, and routes those anew, out of order, when they get no receipt.  So a
    # segment's producer may send on until the client answers a PING, and is closed only then.
    topic = attached.topic
    follows = topic.name.domain is TopicDomain.SEGMENT or is_managed(attached.request.properties)
    sends_may_follow = follows and not topic.sealed
    if not sends_may_follow:
        attached.release_id()
    return _finish(connection, request_id, attached, sends_may_follow=sends_may_follow)


async def _finish(
    connection: Connection, request_id: int, attached: Producer, *, sends_may_follow: bool
) -> None:
    if sends_may_follow:
        await connection.echo()
    await attached.close()
    _succeed_close(connection, request_id)


def _succeed_close(connection: Connection, request_id: int) -> None:
    connection.send(
        BaseCommand(type=BaseCommand.SUCCESS, success=CommandSuccess(request_id=request_id))
    )


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.PRODUCER: producer,
    BaseCommand.CLOSE_PRODUCER: close_producer,
}
