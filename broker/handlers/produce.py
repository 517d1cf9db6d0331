"""PRODUCER, SEND, CLOSE_PRODUCER.

Rules:

- While a PRODUCER is in progress its id is held by a future.  CLOSE_PRODUCER takes it back: the
  open is not answered then, the close is.  A second PRODUCER for the id is refused meanwhile, and
  answered like the first one afterwards.
- SENDs for a producer closed a while ago are dropped quietly: they were on their way.  For an id
  that never was a producer, or is not one yet, they end the connection.
- CLOSE_PRODUCER is answered when all earlier SENDs are durable and have their receipts.
- The stock client writes CLOSE_PRODUCER ahead of SENDs that it has queued already, and routes those
  anew, out of order, when they get no receipt.  While a segment is being sealed its producers may
  send on until they answer a PING, and only then is the close taken.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from broker.producer import Producer, ProducerRequest, remember_closed
from broker.producer_access import AccessMode
from broker.protocol_violation import ProtocolViolation
from broker.publish_errors import MessageRefused
from broker.schemas import definition_from_wire, version_bytes
from broker.topic import TopicState
from protocol.ids import EARLIEST, from_wire, to_wire
from protocol.names import parse_topic_name
from protocol.pulsar_pb2 import (
    BaseCommand,
    CommandProducer,
    CommandProducerSuccess,
    CommandSuccess,
)
from protocol.server_error import MagnetarError, PeerError, ServerError

if TYPE_CHECKING:
    from broker.connection import Connection
    from broker.handlers import Handler
    from broker.topic import Topic
    from protocol.frames import Received, Send

Opening = asyncio.Future[Producer]


class ProducerOpening(PeerError):
    """The id is taken by a PRODUCER in progress: wait for its answer."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ProducerNotFound(PeerError):
    """The connection has no such producer: open it first."""

    code: ClassVar[ServerError] = ServerError.UNKNOWN_ERROR


def producer(
    connection: "Connection", command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """PRODUCER: take the id at once, open in the background."""
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


async def _open(connection: "Connection", request: CommandProducer, opening: Opening) -> None:
    """Attach the producer and answer, unless CLOSE_PRODUCER takes `opening` back first."""
    task = asyncio.current_task()
    if opening.cancelled() or task is None:
        return
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
    if attached.ready is None:
        _opened(connection, request, attached)
        return
    _succeed(connection, request.request_id, attached, ready=False)
    opening.add_done_callback(lambda _: attached.disconnected())
    attached.ready.add_done_callback(
        lambda ready: _waited(connection, request, opening, attached, ready.exception())
    )


def _waited(
    connection: "Connection",
    request: CommandProducer,
    opening: Opening,
    attached: Producer,
    error: BaseException | None,
) -> None:
    """A producer that waited to be exclusive is so now, or will never be."""
    if connection.producers.get(request.producer_id) is not opening:
        return
    if error is None:
        _opened(connection, request, attached)
        return
    del connection.producers[request.producer_id]
    if isinstance(error, MagnetarError):
        connection.reply_error(request.request_id, error)


def _opened(connection: "Connection", request: CommandProducer, attached: Producer) -> None:
    connection.producers[request.producer_id] = attached
    connection.closed_producers.pop(request.producer_id, None)
    _succeed(connection, request.request_id, attached, ready=True)


async def _attach(request: CommandProducer, connection: "Connection") -> Producer:
    name = parse_topic_name(request.topic)
    topic = await connection.broker.topics.get(name, create=True)
    topic.require_open()
    version = await _schema_version(topic, request)
    if request.initial_subscription_name:
        await topic.create_subscription(request.initial_subscription_name, EARLIEST)
    return await topic.add_producer(
        ProducerRequest(
            connection=connection,
            producer_id=request.producer_id,
            name=request.producer_name,
            user_provided_name=bool(request.producer_name) and request.user_provided_producer_name,
            epoch=request.epoch,
            access_mode=AccessMode(request.producer_access_mode),
            topic_epoch=from_wire(request.topic_epoch) if request.HasField("topic_epoch") else None,
            properties={item.key: item.value for item in request.metadata},
            schema_version=version,
        )
    )


async def _schema_version(topic: "Topic", request: CommandProducer) -> bytes:
    """The version of the producer's schema, added to the topic's history if it may be."""
    if not request.HasField("schema"):
        return b""
    broker = topic.broker
    policies = await broker.namespaces.require(topic.name.namespace_name)
    version = await broker.schemas.add(
        topic.name.schema_id, definition_from_wire(request.schema), policies.schema_compatibility
    )
    return b"" if version is None else version_bytes(version)


def _succeed(connection: "Connection", request_id: int, attached: Producer, *, ready: bool) -> None:
    success = CommandProducerSuccess(
        request_id=request_id,
        producer_name=attached.name,
        last_sequence_id=attached.last_sequence_id,
        schema_version=attached.request.schema_version,
        producer_ready=ready,
    )
    if attached.topic_epoch is not None:
        success.topic_epoch = to_wire(attached.topic_epoch)
    connection.send(BaseCommand(type=BaseCommand.PRODUCER_SUCCESS, producer_success=success))


def send(connection: "Connection", frames: "Sequence[Received]", at: int) -> int:
    """SEND, the hot path: frames[at], with those behind it that can be published with it.

    Returns where those end.  Raises `ProtocolViolation` for a producer that is not open.
    """
    request = cast("Send", frames[at])
    attached = connection.producers.get(request.producer_id)
    if isinstance(attached, Producer):
        if request.plain:
            return attached.topic.publish(attached, frames, at)
        if request.entry is None:
            attached.topic.damaged(attached, request)
        elif request.txnid is not None and not connection.broker.transactions.enabled:
            attached.topic.refuse(
                attached, request, MessageRefused("Transactions are off: send without one.")
            )
        else:
            return attached.topic.publish(attached, frames, at)
    elif request.producer_id not in connection.closed_producers:
        raise ProtocolViolation(
            f"SEND names producer {request.producer_id}, which is not open: wait for "
            "PRODUCER_SUCCESS first."
        )
    return at + 1


def close_producer(
    connection: "Connection", command: BaseCommand, entry: bytes | None
) -> Awaitable[None] | None:
    """CLOSE_PRODUCER: take back an open in progress, or finish what is in flight."""
    request = command.close_producer
    known = connection.producers.get(request.producer_id)
    if isinstance(known, Producer):
        return _close(connection, request.request_id, known)
    if known is not None:
        known.cancel()
        del connection.producers[request.producer_id]
        remember_closed(connection, request.producer_id)
    elif request.producer_id not in connection.closed_producers:
        raise ProducerNotFound(
            f"There is no producer {request.producer_id} on this connection: open it first."
        )
    _closed(connection, request.request_id)
    return None


def _close(connection: "Connection", request_id: int, attached: Producer) -> Awaitable[None]:
    """Stop taking SENDs: in this turn of the loop already, unless the segment is being sealed."""
    sealing = attached.topic.state is TopicState.SEALING
    if not sealing:
        attached.release_id()
    return _finish(connection, request_id, attached, sealing=sealing)


async def _finish(
    connection: "Connection", request_id: int, attached: Producer, *, sealing: bool
) -> None:
    if sealing:
        await connection.echo()
    await attached.close()
    _closed(connection, request_id)


def _closed(connection: "Connection", request_id: int) -> None:
    connection.send(
        BaseCommand(type=BaseCommand.SUCCESS, success=CommandSuccess(request_id=request_id))
    )


HANDLERS: "Mapping[int, Handler]" = {
    BaseCommand.PRODUCER: producer,
    BaseCommand.CLOSE_PRODUCER: close_producer,
}
