"""`SegmentProducer`: a PRODUCER on one segment, with its queue and its pending SENDs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from magnetar.bounds import BATCH_PART_PERCENT, SEAL_PATIENCE_S, SEGMENT_DOUBTS
from magnetar.compression import CompressionType
from magnetar.context import ClientContext
from magnetar.errors import (
    ChecksumFailed,
    ClientError,
    MagnetarError,
    MessageTooLarge,
    ProducerBusy,
    ServiceNotReady,
    TopicNotFound,
    TopicTerminated,
    TransactionFailed,
    error_of,
)
from magnetar.layout import Segment
from magnetar.produce.batch import BatchLimits, Queue
from magnetar.produce.entries import EntryEncoder
from magnetar.produce.names import name_on
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.produce.pending import Pending, Verdict
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.server_error import InternalError
from magnetar.settings import member_of
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["SegmentOwner", "SegmentProducer"]

_RECEIPT: Final = pb.BaseCommand.SEND_RECEIPT
Drained = Callable[[Sequence[OutgoingMessage]], None]


class SegmentOwner(Protocol):
    """The owner of segment producers, which gives them messages and gets their outcomes."""

    def stored(self, segment: Segment, sent: SentEntry, where: pb.MessageIdData) -> None:
        """Called when a SEND has its receipt."""

    def refused(self, messages: Sequence[OutgoingMessage], error: MagnetarError) -> None:
        """Called with messages that are not stored, and will not be."""

    def dropped(self, message: OutgoingMessage) -> None:
        """Called with a message that was not sent, as its caller no longer waits for it."""

    def ended(self, segment: Segment, unsent: Sequence[OutgoingMessage]) -> None:
        """Called when the segment accepts no more messages, with those not known to be stored."""

    def lost(
        self, segment: Segment, unsent: Sequence[OutgoingMessage], error: MagnetarError
    ) -> None:
        """Called when the producer cannot be attached, with the messages not known to be stored."""


class _JoinGate:
    """The gate of a message, done when its transaction knows the segment."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done = False

    def done(self) -> bool:
        """Whether the message can be sent, or was refused."""
        return self._done

    def open(self) -> None:
        """Let the message go."""
        self._done = True


class SegmentProducer(Attachment):
    """Publishes to one segment, also after lost connections.

    Messages wait in a queue.  While no SEND is without receipt, the queue is sent at the end of the
    turn of the loop; else the messages that gather become the next batch, after
    `batch_max_delay_ms` at most.

    The producer keeps its id and its name over reconnects; each attempt to attach raises its epoch.
    SENDs without receipt are sent again first.  If the segment accepts no more messages (it was
    sealed, or no longer exists), the owner gets back what is not known to be stored.

    A message without receipt may be stored if a connection was lost since it was sent.  A Magnetar
    broker attaches a producer that comes back to a sealed segment and answers what is stored.
    Otherwise (Apache Pulsar, or the segment no longer exists) the owner gets all such messages
    back, so they may be stored twice.  In a transaction such a message fails instead.
    """

    def __init__(
        self,
        context: ClientContext,
        segment: Segment,
        settings: ProducerSettings,
        schema: pb.Schema | None,
        owner: SegmentOwner,
    ) -> None:
        super().__init__(context)
        self.segment = segment
        self.last_sequence_id = -1
        """The highest sequence id that the broker says is stored."""
        self._settings = settings
        self._schema = schema
        self._owner = owner
        self._producer_id = context.ids.producer_id()
        self._name = name_on(segment, settings.name) if settings.name else ""
        self._epoch = -1
        self._topic_epoch: int | None = None
        self._was_attached = False
        self._assigned_url = ""
        limits = BatchLimits(
            settings.batch_max_messages if settings.batching else 1, settings.batch_max_bytes
        )
        self._limits = limits
        self._queue = Queue(limits, segment.bucket_splits, owner.dropped)
        self._pending = Pending()
        self._encoder: EntryEncoder | None = None
        self._timer: asyncio.Handle | None = None
        self._drained: Drained | None = None
        self._ending: MagnetarError | None = None
        """The error (ended or fenced) that takes effect when older SENDs have their answers."""
        self._missing = 0
        self._refused_since: float | None = None
        """The time since which its broker has only said that the segment is not ready."""
        self._patience: asyncio.TimerHandle | None = None
        self._over = False
        self._loop = context.loop
        self._max_delay_s = settings.batch_max_delay_ms / 1000

    # For its owner

    def give(self, message: OutgoingMessage) -> None:
        """Send a message; the owner gets its outcome."""
        if self._over or self._drained is not None:
            raise InternalError(
                f"{self.describe()} was given a message while it drains; report this as a bug."
            )
        if message.transaction is not None and not self._join(message):
            return
        if self._queue.add(message):
            self._send_queue()
        elif self._timer is None:
            if self._pending and self._max_delay_s:
                self._timer = self._loop.call_later(self._max_delay_s, self._on_timer)
            else:
                self._timer = self._loop.call_soon(self._on_timer)

    def drain(self, then: Drained) -> None:
        """Expect no more messages, and wait for all receipts.

        `then` is called once, with the messages that are not stored, in order.
        """
        self._drained = then
        if not self._pending:
            self._end()
        else:
            self._bound_patience()

    def flush(self) -> None:
        """Send the queue without waiting for more messages."""
        self._send_queue()

    def prune(self) -> None:
        """Drop messages for which no caller waits; those that were sent, only while detached."""
        self._queue.prune()
        if self._queue and self._timer is None and not self._over:
            # Messages behind a dropped one that waited for its transaction can be sent now.
            self._timer = self._loop.call_soon(self._on_timer)
        if self.connection is None:
            self._prune_pending()
            if self._drained is not None and not self._pending:
                self._end()

    def abandon(self) -> list[OutgoingMessage]:
        """Stop, as the topic was deleted; returns the messages that are not stored, in order.

        The owner is not called any more, and closes it.
        """
        self._stop()
        return self.take_unsent()

    def take_unsent(self) -> list[OutgoingMessage]:
        """Remove all messages that are not known to be stored, and return them in order.

        Those of a transaction that may be stored are refused instead: a transaction must have them
        once or not at all, and can abort.
        """
        unsent: list[OutgoingMessage] = []
        doubtful: list[OutgoingMessage] = []
        for sent in self._pending.take_all():
            for message in sent.messages:
                if message.outcome.done():
                    continue
                to = doubtful if sent.in_doubt and message.transaction is not None else unsent
                if sent.index == 0 or not to or to[-1] is not message:
                    to.append(message)
        if doubtful:
            why = "its segment accepts no more messages"
            self._owner.refused(doubtful, _doubted(self.describe(), why))
        unsent += self._queue.take_all()
        return unsent

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The producer of {self.segment.topic}"

    async def find(self) -> Connection:
        """A connection to the broker named in the last CLOSE_PRODUCER, else to the owner."""
        url, self._assigned_url = self._assigned_url, ""
        try:
            if url:
                return await self.context.pool.at(url)
            return await self.context.pool.of_topic(self.segment.topic)
        except MagnetarError:
            self._not_refused()
            raise

    async def attach(self, connection: Connection) -> None:
        """Send PRODUCER."""
        connection.attach(PeerKind.PRODUCER, self._producer_id, self)
        self._epoch += 1
        command = pb.BaseCommand(type=pb.BaseCommand.PRODUCER, producer=self._command(connection))
        try:
            answer = await connection.request(command)
        except ServiceNotReady:
            self._refused_since = self._refused_since or self._loop.time()
            self._bound_patience()
            raise
        except ClientError:
            self._not_refused()
            raise
        except ProducerBusy as error:
            if not self._was_attached:
                raise
            # The broker does not know yet that this producer's earlier connection is lost.
            raise ServiceNotReady(str(error)) from error
        except TopicNotFound as error:
            self._missing += 1
            if self.segment.legacy or self._drained or self._missing > SEGMENT_DOUBTS:
                raise
            # The layout has the segment; this broker may not know that layout yet.
            raise ServiceNotReady(str(error)) from error
        self._missing = 0
        self._not_refused()
        success = answer.producer_success
        self._name = success.producer_name
        if success.HasField("topic_epoch"):
            self._topic_epoch = success.topic_epoch
        if not self._was_attached:
            self._was_attached = True
            self._queue.known = success.last_sequence_id
            self._queue.next_number = success.last_sequence_id + 1
            self.last_sequence_id = success.last_sequence_id
        most = connection.max_message_size * BATCH_PART_PERCENT // 100
        self._queue.limits = replace(self._limits, max_bytes=min(self._limits.max_bytes, most))
        self._encoder = EntryEncoder(
            producer_id=self._producer_id,
            producer_name=success.producer_name,
            max_message_size=connection.max_message_size,
            schema_version=success.schema_version,
            compression=member_of(CompressionType, self._settings.compression),
            chunking=self._settings.chunking,
            buckets=len(self.segment.bucket_splits) + 1,
        )

    def _bound_patience(self) -> None:
        # A sealed segment may never be ready again: Apache Pulsar 5.0.0-M1 leaves it fenced where
        # it seals under load.
        if self._drained and self._refused_since is not None and self._patience is None:
            end = self._refused_since + SEAL_PATIENCE_S
            self._patience = self._loop.call_at(end, self._end)

    def _not_refused(self) -> None:
        self._refused_since = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _command(self, connection: Connection) -> pb.CommandProducer:
        settings = self._settings
        mode = member_of(AccessMode, settings.access_mode)
        if self._was_attached and mode is AccessMode.WAIT_FOR_EXCLUSIVE:
            # A producer that has the topic now has raised its epoch: waiting would not end.
            mode = AccessMode.EXCLUSIVE
        command = pb.CommandProducer(
            topic=self.segment.topic,
            producer_id=self._producer_id,
            epoch=self._epoch,
            user_provided_producer_name=settings.name is not None,
            producer_access_mode=_WIRE_MODES[mode],
            txn_enabled=connection.features.supports_tc_metadata_discovery,
        )
        if self._name:
            command.producer_name = self._name
        if self._schema is not None:
            command.schema.CopyFrom(self._schema)
        if self._topic_epoch is not None:
            command.topic_epoch = self._topic_epoch
        properties = dict(settings.properties)
        if self.segment.legacy:
            properties[MANAGED_PROPERTY] = "true"
        for name, value in properties.items():
            command.metadata.add(key=name, value=value)
        return command

    def attached(self) -> None:
        """Send the SENDs without receipt again, then the queue."""
        self._prune_pending()
        self._refuse_doubtful()
        self._send_again()
        if self._drained is None:
            self._send_queue()
        elif not self._pending:
            self._end()

    def detached(self, error: MagnetarError) -> None:
        """Stop sending until it is attached again."""
        self._encoder = None
        for sent in self._pending:
            sent.in_doubt = True
        if self._drained is not None and not self._pending:
            self._end()

    def failed(self, error: MagnetarError) -> None:
        """Give the messages back: the segment accepts no more, or cannot be attached."""
        self._encoder = None
        gone = isinstance(error, TopicNotFound) and not self.segment.legacy
        if gone or isinstance(error, TopicTerminated):
            if self._drained is not None:
                self._end()
            elif not self._over:
                self._stop()
                self._owner.ended(self.segment, self.take_unsent())
        elif not self._over:
            self._stop()
            self._owner.lost(self.segment, self.take_unsent(), error)

    async def leave(self, connection: Connection) -> None:
        """Send CLOSE_PRODUCER."""
        close = pb.CommandCloseProducer(producer_id=self._producer_id)
        await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.CLOSE_PRODUCER, close_producer=close)
        )

    # Answers of the broker

    def received(self, frame: Frame) -> None:
        """Handle a receipt, an error, or a close by the broker."""
        command = frame.command
        if command.type == _RECEIPT:
            receipt = command.send_receipt
            verdict, sent = self._pending.receipt(receipt.sequence_id)
            if sent is not None:
                self.last_sequence_id = max(self.last_sequence_id, sent.highest)
                self._owner.stored(self.segment, sent, receipt.message_id)
                self._go_on()
            elif verdict is Verdict.REATTACH:
                self.again(_out_of_order(self.describe(), receipt.sequence_id))
        elif command.type == pb.BaseCommand.SEND_ERROR:
            self._send_error(command.send_error)
        elif command.type == pb.BaseCommand.CLOSE_PRODUCER:
            close = command.close_producer
            tls = self.context.pool.tls
            self._assigned_url = (
                close.assigned_broker_service_url_tls if tls else close.assigned_broker_service_url
            )
            self.again(
                ServiceNotReady(f"{self.describe()} was closed by its broker; it is opened anew.")
            )

    def _send_error(self, refusal: pb.CommandSendError) -> None:
        verdict, sent = self._pending.error(refusal.sequence_id, refusal.error)
        error: MagnetarError = error_of(refusal.error, refusal.message)
        if verdict is Verdict.REFUSED and sent is not None:
            self._owner.refused(sent.messages, error)
            self._go_on()
        elif verdict is Verdict.DAMAGED and sent is not None:
            self._owner.refused(sent.messages, _damaged(self.describe()))
            if self._knows_resends:
                # Such a broker expects this SEND before any other, unless the producer is new.
                self.again(ServiceNotReady(str(error)))
            self._go_on()
        elif verdict is Verdict.AGAIN and sent is not None:
            self._resend_damaged(sent)
        elif verdict in (Verdict.ENDED, Verdict.FENCED):
            self._ending = error
            self._go_on()
        elif verdict is Verdict.REATTACH:
            self.again(ServiceNotReady(str(error)))

    def _resend_damaged(self, sent: SentEntry) -> None:
        """Send all again; refuse the SEND instead if a transaction would then store some twice."""
        if self._knows_resends or not _is_transactional(sent):
            self._send_again()
            return
        self._pending.refuse(sent)
        self._owner.refused(sent.messages, _damaged_on_the_way(self.describe()))
        self._go_on()

    @property
    def _knows_resends(self) -> bool:
        return self.connection is None or self.connection.knows_resends

    def _go_on(self) -> None:
        """Go on after a SEND was answered: end, or send the queue."""
        if self._ending is not None and self._pending.is_over:
            if self._knows_resends:
                # All were sent again on this connection, so stored messages have their receipts.
                for sent in self._pending:
                    sent.in_doubt = False
            self.again(self._ending)
        elif not self._pending:
            if self._drained is not None:
                self._end()
            elif self._queue:
                self._send_queue()

    # Sending

    def _on_timer(self) -> None:
        self._timer = None
        self._send_queue()

    def _send_queue(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, encoder = self.connection, self._encoder
        if connection is None or encoder is None or connection.is_lost or self._drained is not None:
            return
        now_ms = self.context.now_ms()
        for batch in self._queue.take_batches():
            sends = self._encode(encoder, batch, now_ms)
            self._pending.add(sends)
            for sent in sends:
                connection.write(*sent.parts)

    def _encode(
        self, encoder: EntryEncoder, batch: Sequence[OutgoingMessage], now_ms: int
    ) -> list[SentEntry]:
        """Encode a batch as SENDs; returns none if it is refused."""
        try:
            return encoder.encode(batch, now_ms)
        except Exception as error:  # noqa: BLE001 - one message's defect must not fail other batches
            if isinstance(error, MessageTooLarge) and len(batch) > 1 and encoder.buckets == 1:
                half = len(batch) // 2
                first = self._encode(encoder, batch[:half], now_ms)
                return first + self._encode(encoder, batch[half:], now_ms)
            self._owner.refused(batch, _not_encoded(self.describe(), error))
            return []

    def _send_again(self) -> None:
        connection = self.connection
        if connection is not None and not connection.is_lost:
            self._pending.begin_resend()
            self._ending = None
            for sent in self._pending:
                if connection.knows_resends or not _is_transactional(sent):
                    connection.write(*sent.parts)

    def _prune_pending(self) -> None:
        for sent in self._pending.prune():
            for message in sent.messages:
                self._owner.dropped(message)

    def _refuse_doubtful(self) -> None:
        """Refuse SENDs in transactions that may be stored, at a broker that would store them twice.

        Such a broker does not recognise a SEND that is sent again.
        """
        if self._knows_resends:
            return
        taken = self._pending.take(lambda sent: sent.in_doubt and _is_transactional(sent))
        doubtful = list(dict.fromkeys(message for sent in taken for message in sent.messages))
        if doubtful:
            why = "its broker stores again what is sent again"
            self._owner.refused(doubtful, _doubted(self.describe(), why))

    def _join(self, message: OutgoingMessage) -> bool:
        """Hold a message until its transaction knows the segment; returns False if refused."""
        transaction = message.transaction
        message.awaits = None
        try:
            joined = None if transaction is None else transaction.writing_to(self.segment.topic)
        except MagnetarError as error:
            self._owner.refused((message,), error)
            return False
        if joined is not None:
            gate = message.awaits = _JoinGate()
            joined.add_done_callback(partial(self._on_joined, message, gate))
        return True

    def _on_joined(
        self, message: OutgoingMessage, gate: _JoinGate, joined: "asyncio.Future[None]"
    ) -> None:
        gate.open()
        if message.awaits is not gate:
            return  # The message has gone to another segment meanwhile.
        if joined.cancelled():
            self._owner.refused(
                (message,), ServiceNotReady("The transaction did not learn of the segment.")
            )
        elif (error := joined.exception()) is not None:
            refusal = error if isinstance(error, MagnetarError) else InternalError(str(error))
            self._owner.refused((message,), refusal)
        if self._timer is None and not self._over:
            self._timer = self._loop.call_soon(self._on_timer)

    # The end

    def _end(self) -> None:
        """End the draining: call the owner, once."""
        drained = self._drained
        if drained is not None and not self._over:
            self._stop()
            drained(self.take_unsent())

    def _stop(self) -> None:
        self._over = True
        self._not_refused()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_WIRE_MODES: Final = {
    AccessMode.SHARED: pb.ProducerAccessMode.Shared,
    AccessMode.EXCLUSIVE: pb.ProducerAccessMode.Exclusive,
    AccessMode.WAIT_FOR_EXCLUSIVE: pb.ProducerAccessMode.WaitForExclusive,
    AccessMode.EXCLUSIVE_WITH_FENCING: pb.ProducerAccessMode.ExclusiveWithFencing,
}


def _out_of_order(what: str, sequence_id: int) -> MagnetarError:
    return ServiceNotReady(
        f"{what} got a receipt for sequence id {sequence_id}, for which no message waits; messages "
        "without receipt are sent again."
    )


def _is_transactional(sent: SentEntry) -> bool:
    """Whether the messages are in a transaction; all of a batch are in the same, or in none."""
    return any(message.transaction is not None for message in sent.messages)


def _doubted(what: str, why: str) -> MagnetarError:
    return TransactionFailed(
        f"{what} lost its connection, and {why}: it is not known whether a message without "
        "receipt is stored. Abort the transaction, and begin another one."
    )


def _not_encoded(what: str, error: Exception) -> MagnetarError:
    if isinstance(error, MagnetarError):
        return error
    failure = InternalError(
        f"{what} cannot encode a message of this batch ({error!r}); check its key, properties, "
        "times and numbers."
    )
    failure.__cause__ = error
    return failure


def _damaged_on_the_way(what: str) -> MagnetarError:
    return ChecksumFailed(
        f"A message of a transaction was damaged on its way. {what} cannot send it again, as its "
        "broker may store twice what followed it. Abort the transaction, and begin another one."
    )


def _damaged(what: str) -> MagnetarError:
    return ChecksumFailed(
        f"A message was damaged in this process before {what[0].lower()}{what[1:]} sent it; send "
        "it again, and check the machine's memory."
    )
