"""`ClusterProducer`: what producers of replicators at another cluster have in common."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from broker.replication.errors import BROKER_FAILED, RemoteRefused, refusal
from config.bounds import (
    ENTRY_HEADROOM,
    REPLICATION_RETRY_MAX_S,
    REPLICATION_RETRY_MIN_S,
    REPLICATOR_LEAVE_S,
)
from magnetar.context import ClientContext
from magnetar.errors import BrokerError, MagnetarError, ServiceNotReady
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.frames import Frame, encode_send
from magnetar.protocol.ids import Position
from magnetar.wire.attachment import Attachment, is_retriable
from magnetar.wire.connection import Connection

log = structlog.get_logger(__name__)

T = TypeVar("T")


class PausesUntilStored(Backoff):
    """Pauses before attempts to attach: they grow until the other cluster stores an entry.

    To be attached is no success yet: it may refuse what is sent first, again and again.
    """

    def reset(self) -> None:
        """Do nothing, when it has attached."""

    def entry_stored(self) -> None:
        """Begin with the first pause again."""
        super().reset()


class ClusterProducer(Attachment):
    """A producer of a replicator, which attaches again until it is closed.

    Whatever the other cluster refuses is tried again after a pause, which grows: an operator may
    have to change something there.  `error` has the last refusal meanwhile.
    """

    def __init__(self, context: ClientContext, topic: str, cluster: str, name: str) -> None:
        rng = context.rng
        self.pauses = PausesUntilStored(
            REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S, lambda: rng.uniform(0.5, 1)
        )
        super().__init__(context, self.pauses)
        self.topic = topic
        self.cluster = cluster
        self.name = name
        self.producer_id = context.ids.producer_id()
        self.attached_ms = 0
        """When it attached last."""
        self.largest_entry = 0
        """Bytes of the largest entry there, metadata and payload."""
        self._epoch = -1

    # For subclasses

    @abstractmethod
    def note_refused(self, error: RemoteRefused) -> None:
        """Tell the owner why it is not attached."""

    @abstractmethod
    async def require_topic(self) -> None:
        """Have the topic there, or raise why it cannot be used."""

    @abstractmethod
    async def open_there(self, connection: Connection) -> None:
        """Send `next_command`, and take its answer."""

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Let the owner send: it has just attached."""

    @abstractmethod
    def leave_owner(self) -> None:
        """Tell the owner nothing more: it is closed, or is to be."""

    @abstractmethod
    def take_receipt(self, receipt: pb.CommandSendReceipt) -> None:
        """Take the answer to a SEND that is stored."""

    @abstractmethod
    def take_refusal(self, refused: pb.CommandSendError) -> None:
        """Take the answer to a SEND that is not stored."""

    def next_command(self) -> pb.CommandProducer:
        """The command with which it attaches now."""
        self._epoch += 1
        return pb.CommandProducer(
            topic=self.topic,
            producer_id=self.producer_id,
            producer_name=self.name,
            user_provided_producer_name=True,
            # Where that is required the messages are looked at, one by one.
            encrypted=True,
            epoch=self._epoch,
        )

    def write_send(
        self, sequence_id: int, entry: bytes, messages: int, *, marker: bool = False
    ) -> None:
        """Send an entry with so many messages.  Call while it is attached."""
        connection = self.connection
        assert connection is not None, "a producer sends while it is attached"
        send = pb.CommandSend(
            producer_id=self.producer_id, sequence_id=sequence_id, num_messages=messages
        )
        if marker:
            send.marker = True
        connection.write(encode_send(pb.BaseCommand(type=pb.BaseCommand.SEND, send=send), entry))

    def refusal_of_size(
        self, topic: str, position: Position, size_bytes: int
    ) -> RemoteRefused | None:
        """Why an entry cannot be sent, of this topic here and of this size; None if it can be.

        It is not left out: it would be missing there for ever.
        """
        if size_bytes <= self.largest_entry:
            return None
        return RemoteRefused(
            f"The entry {position.text} of {topic} has {size_bytes} bytes with its origin, and "
            f"cluster {self.cluster!r} takes {self.largest_entry}: let it take more."
        )

    def unexpected_receipt(self) -> RemoteRefused:
        """The error for a receipt of something else than was sent."""
        return RemoteRefused(f"{self.describe()} got a receipt for what it did not send.")

    # Attachment

    async def find(self) -> Connection:
        """A connection to the broker that owns the topic there."""
        try:
            await self.require_topic()
            return await self.context.pool.of_topic(self.topic)
        except MagnetarError as error:
            # Nothing is given up, whatever fails: the record, a file or the other cluster may be
            # mended.  Of its frames one has the owner, and others have the error.
            raise self.refusal_of(error.with_traceback(None)) from error
        except Exception as error:  # noqa: BLE001 - no error may end it for good
            raise self._failed_at("find", error) from None

    async def attach(self, connection: Connection) -> None:
        """See `open_there`."""
        try:
            await self.open_there(connection)
        except MagnetarError:
            raise
        except Exception as error:  # noqa: BLE001 - no error may end it for good
            raise self._failed_at("attach", error) from None

    def attached(self) -> None:
        """See `begin`."""
        connection = self.connection
        assert connection is not None, "it has just attached"
        self.attached_ms = self.context.now_ms()
        # As brokers of Apache Pulsar and this one: metadata may come on top of a largest payload.
        self.largest_entry = connection.max_message_size + ENTRY_HEADROOM
        self.begin(connection)

    def received(self, frame: Frame) -> None:
        """Take a receipt, a refusal, or the end of the producer."""
        command = frame.command
        if command.type == pb.BaseCommand.SEND_RECEIPT:
            self.take_receipt(command.send_receipt)
        elif command.type == pb.BaseCommand.SEND_ERROR:
            self.take_refusal(command.send_error)
        elif command.type == pb.BaseCommand.CLOSE_PRODUCER:
            self.again(ServiceNotReady(f"{self.describe()} was closed; it is opened anew."))

    async def close(self) -> None:
        """See `Attachment`."""
        try:
            await super().close()
        finally:
            # The owner has it, and so have the frames of the last error: circles would wait for a
            # garbage collection.
            self.leave_owner()
            self.error = None

    async def leave(self, connection: Connection) -> None:
        """Send CLOSE_PRODUCER, and wait a moment for the answer.

        A topic that moves to another broker is closed only then, and nobody can use it meanwhile.
        """
        close = pb.CommandCloseProducer(producer_id=self.producer_id)
        async with asyncio.timeout(REPLICATOR_LEAVE_S):
            await connection.request(
                pb.BaseCommand(type=pb.BaseCommand.CLOSE_PRODUCER, close_producer=close)
            )

    # Answers

    async def answer_of(self, request: Awaitable[T]) -> T:
        """The answer to a request; each refusal is raised as one that is tried again."""
        try:
            return await request
        except BrokerError as error:
            if is_retriable(error):
                raise
            raise self.refusal_of(error) from error

    def refusal_of(self, error: MagnetarError) -> RemoteRefused:
        """The refusal as one that is tried again; the owner is told."""
        refused = refusal(self.cluster, error)
        self.note_refused(refused)
        return refused

    def _failed_at(self, step: str, error: Exception) -> RemoteRefused:
        """The refusal that stands for an error that nobody expected, which is logged."""
        log.error(
            "replicator_failed",
            topic=self.topic,
            cluster=self.cluster,
            step=step,
            exc_info=error.with_traceback(None),
        )
        return self.refusal_of(RemoteRefused(BROKER_FAILED))


def require_segments_taken(connection: Connection, cluster: str) -> None:
    """Raise `RemoteRefused` unless the broker there takes segments of other clusters."""
    if not connection.segment_replication:
        raise RemoteRefused(
            f"Cluster {cluster!r} takes no segments of other clusters (the broker at "
            f"{connection.address} has no segment_replication): update its brokers, or take it out "
            "of the list of clusters."
        )


async def schema_version_at(
    connection: Connection, cluster: str, topic: str, producer: str, schema: pb.Schema
) -> bytes:
    """The version of a schema at another cluster, where it is added if it is missing.

    Raises `RemoteRefused` for whatever that answers, and errors of the connection.
    """
    command = pb.CommandGetOrCreateSchema(topic=topic, schema=schema, producer_name=producer)
    try:
        answer = await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.GET_OR_CREATE_SCHEMA, get_or_create_schema=command)
        )
    except BrokerError as error:
        raise refusal(cluster, error) from error
    return answer.get_or_create_schema_response.schema_version
