"""The producer of one segment: its PRODUCER, its batches, what it has without receipt.

Rules:

- What is given waits in a queue.  While nothing is without receipt the queue is sent at the end of
  the turn of the loop; else what gathers meanwhile is the next batch, for a bounded time.
- It keeps its number and, once it has one, its name; each try to attach raises its epoch.  What has
  no receipt when the connection is lost is sent again first, as it was; in a transaction only if
  the broker knows what it has (`knows_resends`), else it fails.
- What arrived damaged, and is whole here, is sent again with what followed it; in a transaction,
  too, only if the broker knows what it has.
- A broker that closes it says where it may be found, or it is looked up.  A broker that takes no
  more for the segment (sealed, or gone with its layout) ends it, and what is not stored goes back.
- That there is no such segment is doubted a few times first, while the layout has it: a broker may
  have yet to hear of it.
- A sealed segment may never be ready again (Apache Pulsar 5.0.0-M1 leaves it fenced where it seals
  under load): when its broker has refused for SEAL_PATIENCE_S, what has no receipt goes back.
- What has no receipt may be stored, if a connection was lost since it was sent.  A sealed segment
  takes who comes back and answers what it has; then it is known what goes back.  Where nobody tells
  (Apache Pulsar, or the segment is gone) all of it goes back, and so may be stored twice; not so in
  a transaction, where it fails.
- Draining: nothing more is given, and when nothing is without receipt the owner is told, with what
  was not sent; CLOSE_PRODUCER follows.
"""

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
from magnetar.produce.outgoing import Outgoing, Sent
from magnetar.produce.pending import Pending, Verdict
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.server_error import InternalError
from magnetar.settings import member_of
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["SegmentOwner", "SegmentProducer"]

MANAGED_PROPERTY: Final = "__pulsar.v5.managed"
"""Tells a broker that migrates a regular topic that this producer follows layouts."""
_RECEIPT: Final = pb.BaseCommand.SEND_RECEIPT
Drained = Callable[[Sequence[Outgoing]], None]


class SegmentOwner(Protocol):
    """Whoever gives messages to a segment producer."""

    def stored(self, segment: Segment, sent: Sent, where: pb.MessageIdData) -> None:
        """A SEND has its receipt."""

    def refused(self, messages: Sequence[Outgoing], error: MagnetarError) -> None:
        """These are not stored, and will not be."""

    def dropped(self, message: Outgoing) -> None:
        """Nobody waited for it any more; it was not sent."""

    def ended(self, segment: Segment, unsent: Sequence[Outgoing]) -> None:
        """The broker takes no more for the segment; of these nothing is known to be stored."""

    def lost(self, segment: Segment, unsent: Sequence[Outgoing], error: MagnetarError) -> None:
        """It cannot be attached, or not any more."""


class _Joining:
    """Holds a message back until its transaction knows the segment."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done = False

    def done(self) -> bool:
        """Whether the message may go, or is refused."""
        return self._done

    def finish(self) -> None:
        """It may go, or is refused."""
        self._done = True


class SegmentProducer(Attachment):
    """Publishes to one segment, and to it again after a lost connection."""

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
        """The highest that the broker says is stored."""
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
        """What it ends with when what is older than that has its receipts."""
        self._missing = 0
        self._refused_since: float | None = None
        """Since when its broker has said nothing but that the segment is not ready."""
        self._patience: asyncio.TimerHandle | None = None
        self._over = False
        self._loop = context.loop
        self._max_delay_s = settings.batch_max_delay_ms / 1000

    # For its owner

    def give(self, message: Outgoing) -> None:
        """Send it; what becomes of it is told to the owner."""
        if self._over or self._drained is not None:
            raise InternalError(
                f"{self.describe()} was given a message while it drains; report what led to it."
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
        """Nothing more is given.  `then` is called once, with what was not stored, in order."""
        self._drained = then
        if not self._pending:
            self._end()
        else:
            self._bound_patience()

    def flush(self) -> None:
        """Do not wait for more messages."""
        self._send_queue()

    def prune(self) -> None:
        """Let go of what nobody waits for any more, as far as the broker allows."""
        self._queue.prune()
        if self._queue and self._timer is None and not self._over:
            # What waited behind a message without its transaction may go now.
            self._timer = self._loop.call_soon(self._on_timer)
        if self.connection is None:
            self._prune_pending()
            if self._drained is not None and not self._pending:
                self._end()

    def abandon(self) -> list[Outgoing]:
        """Its segment is of a topic that is no more: what is not stored, in order.  Close it then;
        it tells its owner nothing more.
        """
        self._stop()
        return self.take_unsent()

    def take_unsent(self) -> list[Outgoing]:
        """Everything that is not stored, in order; it has nothing afterwards.

        What may be stored all the same is refused if it is in a transaction: that must have it once
        or not at all, and can abort.
        """
        unsent: list[Outgoing] = []
        doubtful: list[Outgoing] = []
        for sent in self._pending.take_all():
            for message in sent.messages:
                if message.outcome.done():
                    continue
                to = doubtful if sent.in_doubt and message.transaction is not None else unsent
                if sent.index == 0 or not to or to[-1] is not message:
                    to.append(message)
        if doubtful:
            why = "its segment takes no more"
            self._owner.refused(doubtful, _doubted(self.describe(), why))
        unsent += self._queue.take_all()
        return unsent

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"The producer of {self.segment.topic}"

    async def find(self) -> Connection:
        """The broker that was named when it was closed, else that which a lookup finds."""
        url, self._assigned_url = self._assigned_url, ""
        try:
            if url:
                return await self.context.pool.at(url)
            return await self.context.pool.of_topic(self.segment.topic)
        except MagnetarError:
            self._not_refused()
            raise

    async def attach(self, connection: Connection) -> None:
        """PRODUCER."""
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
            # Its own earlier self, of which the broker has not found out yet that it is gone.
            raise ServiceNotReady(str(error)) from error
        except TopicNotFound as error:
            self._missing += 1
            if self.segment.legacy or self._drained or self._missing > SEGMENT_DOUBTS:
                raise
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
            # Whoever has the topic now has raised its epoch: waiting for him would be in vain.
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
        """Send again what has no receipt, then what has gathered."""
        self._prune_pending()
        self._refuse_doubtful()
        self._send_again()
        if self._drained is None:
            self._send_queue()
        elif not self._pending:
            self._end()

    def detached(self, error: MagnetarError) -> None:
        """Nothing is sent until it is attached again."""
        self._encoder = None
        for sent in self._pending:
            sent.in_doubt = True
        if self._drained is not None and not self._pending:
            self._end()

    def failed(self, error: MagnetarError) -> None:
        """It takes no more, or cannot be reached for good."""
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
        """CLOSE_PRODUCER."""
        close = pb.CommandCloseProducer(producer_id=self._producer_id)
        await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.CLOSE_PRODUCER, close_producer=close)
        )

    # What the broker says

    def received(self, frame: Frame) -> None:
        """Receipts, errors, and that the broker has closed it."""
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
                # It takes nothing that follows before it has this one, unless it is opened anew.
                self.again(ServiceNotReady(str(error)))
            self._go_on()
        elif verdict is Verdict.AGAIN and sent is not None:
            self._arrived_damaged(sent)
        elif verdict in (Verdict.ENDED, Verdict.FENCED):
            self._ending = error
            self._go_on()
        elif verdict is Verdict.REATTACH:
            self.again(ServiceNotReady(str(error)))

    def _arrived_damaged(self, sent: Sent) -> None:
        """Send it again, with what follows; not so what would be stored twice in a transaction."""
        if self._knows_resends or not _is_transactional(sent):
            self._send_again()
            return
        self._pending.refuse(sent)
        self._owner.refused(sent.messages, _arrived_damaged(self.describe()))
        self._go_on()

    @property
    def _knows_resends(self) -> bool:
        return self.connection is None or self.connection.knows_resends

    def _go_on(self) -> None:
        """Something has left `pending`, or it is known to end."""
        if self._ending is not None and self._pending.is_over:
            if self._knows_resends:
                # All of it was sent again on this connection: what is stored has its receipt.
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
        for batch in self._queue.cut():
            sends = self._encoded(encoder, batch, now_ms)
            self._pending.add(sends)
            for sent in sends:
                connection.write(*sent.parts)

    def _encoded(self, encoder: EntryEncoder, batch: Sequence[Outgoing], now_ms: int) -> list[Sent]:
        """The SENDs of a batch; none if it is refused."""
        try:
            return encoder.encode(batch, now_ms)
        except Exception as error:  # noqa: BLE001 - a defect of one message is no other batch's
            if isinstance(error, MessageTooLarge) and len(batch) > 1 and encoder.buckets == 1:
                half = len(batch) // 2
                first = self._encoded(encoder, batch[:half], now_ms)
                return first + self._encoded(encoder, batch[half:], now_ms)
            self._owner.refused(batch, _not_encoded(self.describe(), error))
            return []

    def _send_again(self) -> None:
        connection = self.connection
        if connection is not None and not connection.is_lost:
            self._pending.resent()
            self._ending = None
            for sent in self._pending:
                if connection.knows_resends or not _is_transactional(sent):
                    connection.write(*sent.parts)

    def _prune_pending(self) -> None:
        for sent in self._pending.prune():
            for message in sent.messages:
                self._owner.dropped(message)

    def _refuse_doubtful(self) -> None:
        """What may be stored in a transaction already, by a broker that would store it twice."""
        if self._knows_resends:
            return
        taken = self._pending.take(lambda sent: sent.in_doubt and _is_transactional(sent))
        doubtful = list(dict.fromkeys(message for sent in taken for message in sent.messages))
        if doubtful:
            why = "its broker stores again what is sent again"
            self._owner.refused(doubtful, _doubted(self.describe(), why))

    def _join(self, message: Outgoing) -> bool:
        """Hold the message until its transaction knows the segment; False: it is refused."""
        transaction = message.transaction
        message.awaits = None
        try:
            joined = None if transaction is None else transaction.writing_to(self.segment.topic)
        except MagnetarError as error:
            self._owner.refused((message,), error)
            return False
        if joined is not None:
            gate = message.awaits = _Joining()
            joined.add_done_callback(partial(self._joined, message, gate))
        return True

    def _joined(self, message: Outgoing, gate: _Joining, joined: "asyncio.Future[None]") -> None:
        gate.finish()
        if message.awaits is not gate:
            return  # it is on its way elsewhere meanwhile
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
        """Drained: tell the owner, once."""
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
        f"{what} got a receipt of sequence id {sequence_id} before those of earlier messages; what "
        "has none is sent again."
    )


def _is_transactional(sent: Sent) -> bool:
    """All messages of a batch are in one transaction, or in none."""
    return any(message.transaction is not None for message in sent.messages)


def _doubted(what: str, why: str) -> MagnetarError:
    return TransactionFailed(
        f"{what} lost its connection, and {why}: nobody can tell whether a message that had no "
        "receipt is stored. Abort the transaction, and begin another one."
    )


def _not_encoded(what: str, error: Exception) -> MagnetarError:
    if isinstance(error, MagnetarError):
        return error
    failure = InternalError(
        f"{what} cannot encode a message of this batch ({error!r}); look at what was given as "
        "key, properties, times and numbers."
    )
    failure.__cause__ = error
    return failure


def _arrived_damaged(what: str) -> MagnetarError:
    return ChecksumFailed(
        f"A message of a transaction was damaged on its way. {what} cannot send it again, as its "
        "broker may store twice what followed it. Abort the transaction, and begin another one."
    )


def _damaged(what: str) -> MagnetarError:
    return ChecksumFailed(
        f"A message was damaged in this process before {what[0].lower()}{what[1:]} sent it; send "
        "it again, and check the machine's memory."
    )
