"""`SegmentConsumer`: a SUBSCRIBE on one segment, and its timer of redeliveries."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar, cast

from magnetar.background_tasks import BackgroundTasks
from magnetar.bounds import LEAVE_S, MAX_ACK_GROUP, MAX_UNCOMPRESSED_BYTES
from magnetar.consume.ack_tracker import Acknowledgement, AckTracker, bit_of
from magnetar.consume.acknowledgements import (
    DONE,
    AckAnswers,
    AckTransaction,
    OutstandingMessages,
    share_outcome,
)
from magnetar.consume.commands import (
    acks_of,
    acks_up_to_of,
    close_of,
    cumulative_ack_of,
    damage_of,
    flow_of,
    redeliver_all_of,
    redelivers_of,
    subscribe_of,
    unsubscribe_of,
)
from magnetar.consume.decoding import ChunkAssembly, DecodedEntry, Decoder, Permits, permits_of
from magnetar.consume.message import EntryKey, RawMessage
from magnetar.consume.receiving import Inbox
from magnetar.consume.redelivery import ProcessingTimeouts, Redelivery
from magnetar.consume.settings import SubscribeSettings, SubscriptionKind
from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    MagnetarError,
    OperationTimedOut,
    ServiceNotReady,
)
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.ids import from_wire
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["RedeliveryTimer", "SegmentConsumer", "SubscribedSegment"]


R = TypeVar("R")
_log = logging.getLogger(__name__)
_MESSAGE: Final = pb.BaseCommand.MESSAGE


class SubscribedSegment(Protocol):
    """The segment of a subscription."""

    @property
    def segment_id(self) -> int:
        """The id of the segment in the topic."""

    @property
    def topic(self) -> str:
        """The name for SUBSCRIBE."""


class RedeliveryTimer:
    """The timer by which a segment consumer requests messages again.

    Negatively acknowledged messages are requested after their delay (`Redelivery`), unacknowledged
    ones after their timeout (`ProcessingTimeouts`).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: SubscribeSettings,
        tracker: AckTracker,
        ask: Callable[[Mapping[EntryKey, int]], None],
    ) -> None:
        """`ask` is called with entries and bits, and calls `asked` for whole entries."""
        delay, timeout_ms = settings.nack_delay, settings.processing_timeout_ms
        self.nacked: Final = Redelivery(delay.min_ms, delay.max_ms, delay.multiplier)
        self.timeouts: Final = ProcessingTimeouts(timeout_ms) if timeout_ms else None
        """The processing timeouts; None if there are none."""
        self._loop = loop
        self._tracker = tracker
        self._request_messages = ask
        self._handle: asyncio.TimerHandle | None = None
        self._at_ms = 0
        """The time at which `_handle` is called."""

    def nack(self, keys: Sequence[EntryKey], redelivery_count: int, index: int = -1) -> None:
        """Request entries when their delay is over, for the message with this index."""
        self.nacked.add(keys, redelivery_count, self._now_ms(), index)
        self._schedule(self.nacked.next_ms)

    def handed_out(self, key: EntryKey, index: int) -> None:
        """Begin the time of a message, if there is a timeout."""
        if self.timeouts is not None:
            due_ms = self.timeouts.handed_out(key, index, self._now_ms())
            if self._handle is None or due_ms < self._at_ms:
                self._schedule(due_ms)

    def end(self, message_id: EntryId) -> bool:
        """End the time of a message; returns whether it had begun."""
        timeouts = self.timeouts
        return timeouts is not None and timeouts.end(message_id.key, message_id.batch_index)

    def asked(self, keys: Sequence[EntryKey]) -> None:
        """Forget the delays and timeouts of entries that are requested."""
        for key in keys:
            self.nacked.forget(key)
        if self.timeouts is not None:
            self.timeouts.end_all(keys)

    def attached(self) -> None:
        """Forget delays, as the broker delivers everything again; timeouts go on."""
        self.nacked.clear()

    def clear(self) -> None:
        """Forget everything: the broker delivers all again, or nothing any more."""
        self.nacked.clear()
        if self.timeouts is not None:
            self.timeouts.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self, due_ms: int | None) -> None:
        """Run the timer at this time, unless it runs sooner."""
        if due_ms is None or (self._handle is not None and self._at_ms <= due_ms):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_ms = due_ms
        wait_s = max(0, due_ms - self._now_ms()) / 1000
        self._handle = self._loop.call_later(wait_s, self._request_due)

    def _request_due(self) -> None:
        """Request all entries that are due."""
        self._handle = None
        now_ms = self._now_ms()
        due = self.nacked.due(now_ms)
        if self.timeouts is not None:
            for late in self.timeouts.due(now_ms):
                due.update(dict.fromkeys(self._tracker.entries_of(EntryId(*late)), -1))
            self._schedule(self.timeouts.next_ms)
        if due:
            self._request_messages(due)
        self._schedule(self.nacked.next_ms)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)


class SegmentConsumer(Attachment):
    """A consumer of one segment: one SUBSCRIBE, over reconnects.

    An acknowledgement without a transaction is in a group when `acknowledge` returns; the group is
    sent within `ack_grouping_ms`, on the next connection if this one is lost.  In a transaction the
    result waits for the broker's answer; cancelling the caller changes nothing.  A message that is
    acknowledged in a transaction has no processing timeout any more, as the broker delivers it
    again after an abort; if the acknowledgement fails, the timeout begins again.

    On a new attachment the broker delivers all unacknowledged messages again, so those in the inbox
    are dropped.  Those handed out can still be acknowledged, and are not handed out twice on a
    shared subscription (`AckTracker`).  Without a durable cursor the inbox is kept, and reading
    goes on after its last message.

    If it fails for good it calls `on_failure`; without one the inbox fails.
    """

    def __init__(
        self,
        context: ClientContext,
        segment: SubscribedSegment,
        settings: SubscribeSettings,
        inbox: "Inbox[SegmentConsumer]",
    ) -> None:
        super().__init__(context)
        self.segment: Final = segment
        self.settings: Final = settings
        self.consumer_id: Final = context.ids.consumer_id()
        self.ended = False
        """Whether the broker has said that the topic is terminated and all is acknowledged."""
        self.damaged = 0
        """The number of entries that could not be unpacked."""
        self.on_end: Callable[[SegmentConsumer], None] | None = None
        self.on_failure: Callable[[SegmentConsumer], None] | None = None
        self._inbox = inbox
        self._permits = Permits(settings.receiver_queue_size)
        self._shared = settings.durable and not settings.ordered
        self._tracker = AckTracker(shared=self._shared)
        self._answers = AckAnswers()
        self._chunks = ChunkAssembly(
            settings.max_pending_chunked_messages,
            settings.expire_chunked_after_ms,
            MAX_UNCOMPRESSED_BYTES,
            max_bytes=settings.max_pending_chunked_bytes,
            in_order=settings.kind is SubscriptionKind.EXCLUSIVE,
        )
        self._timer = RedeliveryTimer(context.loop, settings, self._tracker, self._redeliver)
        self._nacked = self._timer.nacked
        self._timeouts = self._timer.timeouts
        self._last: RawMessage[SegmentConsumer] | None = None
        """The last message that was put into the inbox."""
        self._decoder = self._new_decoder()
        in_order = settings.durable and settings.kind is not SubscriptionKind.SHARED
        self._handed_out = OutstandingMessages() if in_order else None
        self._answering = BackgroundTasks()
        self._losses = 0
        """The number of lost attachments."""
        self._epoch = 0
        self._leaving = False
        self._acks_due: asyncio.TimerHandle | None = None
        self._up = asyncio.Event()
        """Set while it is attached, and when it will not be again."""

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The consumer of {self.segment.topic} in {self.settings.subscription!r}"

    async def find(self) -> Connection:
        """A connection to the broker that serves the segment."""
        return await self.context.pool.of_topic(self.segment.topic)

    async def attach(self, connection: Connection) -> None:
        """Send SUBSCRIBE."""
        connection.attach(PeerKind.CONSUMER, self.consumer_id, self)
        after = self._start_position()
        await connection.request(
            subscribe_of(self.segment.topic, self.consumer_id, self._epoch, self.settings, after)
        )

    def attached(self) -> None:
        """Send the pending acknowledgements, and request messages."""
        self._up.set()
        self._send_acks()
        self._request_messages()

    def detached(self, error: MagnetarError) -> None:
        """Drop the messages in the inbox, as they come again."""
        self._up.clear()
        self._losses += 1
        self._answers.lost(error)
        self._reset_for_attachment()

    def failed(self, error: MagnetarError) -> None:
        """Fail all waiting callers: it will not be attached again."""
        self._up.set()
        self._answers.over(error)
        if self._handed_out is not None:
            self._handed_out.give_up()
        if self.on_failure is not None:
            self.on_failure(self)
        else:
            self._inbox.fail(error)

    async def leave(self, connection: Connection) -> None:
        """Send the last acknowledgements, then CLOSE_CONSUMER, and wait for all answers."""
        if self.state is AttachmentState.CLOSED:
            self._write_acks(connection)
        await connection.request(close_of(self.consumer_id), LEAVE_S)
        if self.state is AttachmentState.CLOSED and (awaited := self._answers.awaited):
            await asyncio.wait(awaited)

    async def close(self) -> None:
        """Send the last acknowledgements, and close; all other messages go to other consumers."""
        if self._acks_due is not None:
            self._acks_due.cancel()
            self._acks_due = None
        self._timer.clear()
        if self._handed_out is not None:
            self._handed_out.give_up()
        self._leaving = True
        self._inbox.drop(self)
        self._up.set()
        try:
            await super().close()
        finally:
            self._answers.over(self._closed_error())

    def _reset_for_attachment(self) -> None:
        """Prepare for a new attachment, where the broker has no permits."""
        kept = 0
        if self.settings.durable:
            dropped = [
                (each.entry.key, bit_of(each.batch_index)) for each in self._inbox.drop(self)
            ]
            self._tracker.give_back((*dropped, *self._nacked.messages.items()))
            self._tracker.start_attachment()
            self._chunks.clear()
            if self._handed_out is not None:
                self._handed_out.attached()
        else:
            # Chunks that came before the last message of the inbox do not come again.
            kept = self._permits.waiting
        self._permits.reset()
        self._permits.keep(kept)
        (self._timer.attached if self._shared else self._timer.clear)()
        self._decoder = self._new_decoder()

    def _start_position(self) -> EntryId | None:
        """The id after which reading goes on, if the subscription is not durable."""
        return self.settings.start_after if self._last is None else self._last.entry_id

    def _new_decoder(self) -> "Decoder[SegmentConsumer]":
        if self.settings.durable:
            return Decoder(self, self._chunks, self._tracker)
        return Decoder(self, self._chunks, None, self._start_position())

    # Handler

    def received(self, frame: Frame) -> None:
        """Handle a command of the broker."""
        kind = frame.command.type
        if kind == _MESSAGE:
            self._take_message(frame)
        elif kind == pb.BaseCommand.CLOSE_CONSUMER:
            self.again(ServiceNotReady(f"The broker has closed {self.describe()}; it comes back."))
        elif kind == pb.BaseCommand.REACHED_END_OF_TOPIC and not self.ended:
            self.ended = True
            if self.on_end is not None:
                self.on_end(self)

    def _take_message(self, frame: Frame) -> None:
        message = frame.command.message
        if self._leaving:
            return
        if self._epoch and self._is_of_earlier_epoch(message):
            # Sent before the broker got the request to redeliver everything.
            self._permits.arrived(permits_of(frame.entry), 0)
            self._request_messages()
            return
        decoded = self._decoder.decode(message, frame.entry, self.context.now_ms())
        messages = decoded.messages
        self._permits.arrived(decoded.permits, len(messages))
        if messages:
            self._last = messages[-1]
            self._inbox.put(self, messages)
        if decoded.why or decoded.again or decoded.too_old or decoded.failure:
            self._report_problems(decoded, message.redelivery_count)
        self._request_messages()

    def _is_of_earlier_epoch(self, message: pb.CommandMessage) -> bool:
        """Whether a message was sent before the last request to redeliver everything."""
        # Not every broker puts the epoch into messages of shared segments.
        shared = self.settings.kind is SubscriptionKind.KEY_SHARED
        if shared and not message.HasField("consumer_epoch"):
            return False
        return from_wire(message.consumer_epoch) < self._epoch

    def _report_problems(
        self, decoded: "DecodedEntry[SegmentConsumer]", redelivery_count: int
    ) -> None:
        """Log and report entries without a readable message, and handle dropped chunks."""
        if decoded.failure is not None:
            self.again(decoded.failure)
        if decoded.why:
            self.damaged += 1
            _log.warning(
                "message_not_readable topic=%s entry=%s:%s why=%s",
                self.segment.topic,
                *decoded.key,
                decoded.why,
            )
        if not self.settings.durable:
            return
        if decoded.damage is not None and self.connection is not None:
            self.connection.send(damage_of(self.consumer_id, decoded.key, decoded.damage))
        for key in decoded.too_old:
            self._tracker.acknowledge_entry(key)
        if decoded.too_old:
            self._schedule_acks()
        if decoded.again and self.settings.kind is not SubscriptionKind.EXCLUSIVE:
            self._redeliver_later(decoded.again, redelivery_count)

    # Permits

    def taken(self, received: RawMessage[object]) -> None:
        """Note a message that the inbox hands out."""
        if self._handed_out is not None:
            self._handed_out.add(received)
        elif received.entry.chunks and not self.settings.durable:
            self._chunks.pass_up_to(received.entry.key)
        if self._permits.taken():
            self._request_messages()

    def taken_back(self, received: RawMessage[object]) -> None:
        """Note a message that was not handed out after all."""
        self._permits.keep(1)
        if self._handed_out is not None:
            self._handed_out.take_back(received)
        elif received.entry.chunks and not self.settings.durable:
            self._chunks.add_complete(received.entry.chunks)

    def inbox_has_capacity(self) -> None:
        """Request messages again, as the inbox is not full any more."""
        self._request_messages()

    def _request_messages(self) -> None:
        connection = self.connection
        if connection is None or connection.is_lost or self._leaving:
            # A connection may be lost before this consumer is told.  It asks again when attached.
            return
        if self._inbox.is_full:
            self._inbox.call_when_not_full(self)
            return
        permits = self._permits.to_ask()
        if permits:
            connection.send(flow_of(self.consumer_id, permits))

    # Acknowledgements

    def acknowledge(
        self, message_id: EntryId, transaction: AckTransaction | None = None
    ) -> Awaitable[None]:
        """Acknowledge one message; the class says when the result is done.

        Raises `AlreadyClosed`, and `InvalidArgument` for an id without the size of its batch.  In a
        transaction it raises the broker's error (`TransactionConflict`) and the transaction's.
        """
        self._check_open()
        message_id = self._tracker.sized(message_id)
        if transaction is not None:
            return self._acknowledge_in_transaction(transaction, message_id)
        self._acknowledge(message_id.key, message_id.batch_index, message_id.batch_size)
        if self._handed_out is not None:
            self._handed_out.acknowledged(message_id)
        return DONE

    def acknowledge_received(self, received: RawMessage[object]) -> None:
        """Acknowledge a message of a shared subscription without a transaction: the fast path."""
        self._check_open()
        entry = received.entry
        for chunk in entry.chunks:
            # The tracker does not know the chunks any more if they were requested again.
            self._tracker.acknowledge_entry(chunk)
        self._acknowledge(entry.key, received.batch_index, entry.batch_size)

    def _acknowledge(self, key: EntryKey, index: int, size: int) -> None:
        if self._timeouts is not None:
            self._timeouts.end(key, index)
        if self._nacked.waiting:
            for each in self._tracker.entries_of(EntryId(*key)):
                self._nacked.forget(each, index)
        self._tracker.acknowledge(key, index, size)
        if self._acks_due is None or self._tracker.waiting >= MAX_ACK_GROUP:
            self._schedule_acks()

    def acknowledge_up_to(
        self, message_id: EntryId, transaction: AckTransaction | None = None
    ) -> Awaitable[None]:
        """Acknowledge a message and all before it; not on a shared subscription.

        Raises the errors of `acknowledge`.
        """
        self._check_open()
        message_id = self._tracker.sized(message_id)
        if transaction is not None:
            return self._acknowledge_in_transaction(transaction, message_id, up_to=True)
        out = self._handed_out
        found = out.acknowledged_up_to(message_id) if out is not None else []
        self._chunks.pass_up_to(message_id.key)
        if self._chunks.open_across(message_id.key) is None:
            self._tracker.acknowledge_up_to(message_id)
        else:
            # The first chunks of a message that ends after this one must not be acknowledged.
            for each in {message_id, *found}:
                self._acknowledge(each.key, each.batch_index, each.batch_size)
        self._schedule_acks()
        return DONE

    def before_open(self, last: EntryId) -> EntryId:
        """The id after which to read on: `last`, or before a chunked message that spans it."""
        first = self._chunks.open_across(last.key)
        return last if first is None else EntryId(first[0], first[1] - 1)

    async def confirmed(self) -> None:
        """Wait until the broker has confirmed all earlier acknowledgements.

        Raises the broker's error, `ConnectionLost` or `OperationTimedOut` if it is not known
        whether they took effect, and `AlreadyClosed` if they were not sent.  Cancelling it changes
        nothing.
        """
        self._send_acks()
        if self._tracker.waiting:
            self._check_open()
            if self.state is AttachmentState.FAILED and self.error is not None:
                raise self.error
        outcome: asyncio.Future[None] = self.context.loop.create_future()
        self._answers.wait(outcome, for_next=self._tracker.waiting > 0)
        await self._limit_wait(outcome)

    async def _limit_wait(self, work: Awaitable[R]) -> R:
        """Wait for the operation timeout at most.  Raises `OperationTimedOut`."""
        limit_s = self.context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as error:
            if isinstance(error, MagnetarError):
                raise
            raise OperationTimedOut(
                f"{self.describe()} had no connection, or no answer, for {limit_s:g} s; check "
                "whether the brokers are well, or raise operation_timeout_s."
            ) from (self.error or error)

    def _acknowledge_in_transaction(
        self, transaction: AckTransaction, message_id: EntryId, *, up_to: bool = False
    ) -> Awaitable[None]:
        """Acknowledge in a transaction."""
        # The transaction first: if it refuses, nothing must have changed here.
        said = transaction.acknowledging_on(self.segment.topic, self.settings.subscription)
        outcome: asyncio.Future[None] = self.context.loop.create_future()
        transaction.track(cast("asyncio.Future[object]", outcome))
        held: Sequence[Acknowledgement] = ()
        if up_to:
            commands = self._commands_up_to(message_id, transaction.id)
        else:
            held = self._tracker.hold(message_id)
            commands = list(acks_of(self.consumer_id, held, transaction.id))
        connection, losses = self.connection, self._losses
        in_time = self._timer.end(message_id)
        task = self._answering.start(
            self._send_when_joined(said, commands, losses if up_to else None)
        )

        def over(task: asyncio.Task[None]) -> None:
            came_again = not up_to and self._tracker.settle(message_id)
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                # On a later attachment, also one on the same connection, the message comes again.
                same_attachment = connection is self.connection and losses == self._losses
                if connection is not None and same_attachment:
                    self._tracker.release(message_id, held)
                    if in_time:
                        self._timer.handed_out(message_id.key, message_id.batch_index)
                outcome.set_exception(error)
            else:
                self._record_acknowledged(message_id, up_to=up_to)
                outcome.set_result(None)
            if came_again:
                self._redeliver({each.key: bit_of(message_id.batch_index) for each in held})

        task.add_done_callback(over)
        return share_outcome(outcome)

    def _commands_up_to(
        self, message_id: EntryId, transaction: tuple[int, int]
    ) -> list[pb.BaseCommand]:
        out = self._handed_out
        found = out.said_up_to(message_id) if out is not None else []
        # As without a transaction, the first chunks of a message must not be acknowledged.
        first = self._chunks.open_across(message_id.key)
        up_to, single = self._tracker.hold_up_to(message_id, found, first)
        return list(acks_up_to_of(self.consumer_id, up_to, single, transaction))

    async def _send_when_joined(
        self,
        said: asyncio.Future[None] | None,
        commands: Sequence[pb.BaseCommand],
        losses: int | None,
    ) -> None:
        if said is not None:
            await asyncio.shield(said)
        if losses is not None and (losses != self._losses or self.connection is None):
            # Another consumer may have the segment meanwhile, and have processed messages of it.
            raise ConnectionLost(
                f"{self.describe()} lost its connection before the acknowledgement was sent; abort "
                "the transaction, as everything comes again."
            )
        connection = await self._wait_attached()
        await asyncio.gather(*(connection.request(command) for command in commands))

    def _record_acknowledged(self, message_id: EntryId, *, up_to: bool) -> None:
        if self._handed_out is not None and up_to:
            self._handed_out.acknowledged_up_to(message_id)
        elif self._handed_out is not None:
            self._handed_out.acknowledged(message_id)

    async def _wait_attached(self) -> Connection:
        """Wait until it is attached; returns the connection.

        Raises the error with which it has failed, `AlreadyClosed` and `OperationTimedOut`.
        """
        connection = self.connection
        return (
            connection
            if connection is not None
            else await self._limit_wait(self._connection_when_attached())
        )

    async def _connection_when_attached(self) -> Connection:
        while (connection := self.connection) is None:
            if self.state is AttachmentState.FAILED and self.error is not None:
                raise self.error
            if self._closing is not None:
                raise self._closed_error()
            await self._up.wait()
        return connection

    def _check_open(self) -> None:
        if self.state is AttachmentState.CLOSED:
            raise self._closed_error()

    def _closed_error(self) -> AlreadyClosed:
        return AlreadyClosed(f"{self.describe()} is closed; the message goes to another consumer.")

    def _schedule_acks(self) -> None:
        """Send the group now if it is full, else after `ack_grouping_ms`."""
        if self._tracker.waiting >= MAX_ACK_GROUP or not self.settings.ack_grouping_ms:
            self._send_acks()
        elif self._acks_due is None:
            self._acks_due = self.context.loop.call_later(
                self.settings.ack_grouping_ms / 1000, self._send_acks
            )

    def _send_acks(self) -> None:
        if self._acks_due is not None:
            self._acks_due.cancel()
            self._acks_due = None
        if self.connection is not None:
            self._write_acks(self.connection)

    def _write_acks(self, connection: Connection) -> None:
        if self.settings.durable and not connection.is_lost and self._tracker.waiting:
            commands = self._commands_of_group()
            asked: list[int] = []
            answered = self._answers.sent(len(commands), partial(_forget, connection, asked))
            asked += [connection.ask(command, answered) for command in commands]

    def _commands_of_group(self) -> list[pb.BaseCommand]:
        up_to, single = self._tracker.take_group()
        commands = list(acks_of(self.consumer_id, single))
        if up_to is not None:
            commands.append(cumulative_ack_of(self.consumer_id, up_to))
        return commands

    # Redelivery

    def begin_processing(self, received: RawMessage[object]) -> None:
        """Start the processing timeout of a message that the application has now."""
        if self.state is AttachmentState.ATTACHED:
            self._timer.handed_out(received.entry.key, received.batch_index)

    def nack_handed_out(self, message_id: EntryId, redelivery_count: int) -> None:
        """Like `nack`; with a processing timeout, only if that has not requested the message."""
        # Requested twice, its redelivery count would rise twice.
        if self._timeouts is None or self._timer.end(message_id):
            self.nack(message_id, redelivery_count)

    def nack(self, message_id: EntryId, redelivery_count: int) -> None:
        """Request a message again, after a delay that grows with each redelivery."""
        # A message that a transaction acknowledges comes again if that aborts.
        if self._shared and not self._tracker.is_in_hand(message_id):
            return
        keys = self._tracker.entries_of(message_id)
        self._redeliver_later(keys, redelivery_count, message_id.batch_index)

    def redeliver(self, message_ids: Sequence[EntryId]) -> None:
        """Request messages again now; an exclusive subscription requests everything."""
        if self.settings.kind is SubscriptionKind.EXCLUSIVE:
            self._redeliver_all()
        else:
            keys = [key for each in message_ids for key in self._tracker.entries_of(each)]
            self._redeliver(dict.fromkeys(keys, -1))

    def _redeliver_all(self) -> None:
        self._send_acks()
        self._permits.taken(len(self._inbox.drop(self)))
        self._chunks.clear()
        if self.connection is not None and not self.connection.is_lost:
            # Only while attached: the messages of a pending SUBSCRIBE have the epoch it was sent.
            self._epoch += 1
            self.connection.send(redeliver_all_of(self.consumer_id, self._epoch))
            self._request_messages()

    def _redeliver(self, messages: Mapping[EntryKey, int]) -> None:
        """Request entries with the bits of their messages; those in the inbox come again too."""
        connection = self.connection
        self._tracker.give_back(messages.items())
        if connection is None or connection.is_lost:
            return  # They come with the next attachment.
        self._send_acks()
        self._permits.taken(len(self._inbox.drop(self, messages)))
        whole = [key for key, bits in messages.items() if bits == bit_of(-1)]
        self._timer.asked(whole)
        self._tracker.forget(whole)
        for command in redelivers_of(self.consumer_id, messages):
            connection.send(command)
        self._request_messages()

    def _redeliver_later(
        self, keys: Sequence[EntryKey], redelivery_count: int, index: int = -1
    ) -> None:
        if self.state is AttachmentState.ATTACHED:
            self._timer.nack(keys, redelivery_count, index)
        else:
            self._tracker.give_back((key, bit_of(index)) for key in keys)

    # The end

    async def leave_in_order(self) -> None:
        """Hand out no more messages, and close when those handed out are acknowledged.

        This waits for the application without limit.  Not for a shared subscription.
        """
        self._leaving = True
        self._inbox.drop(self)
        if self._handed_out is not None:
            await self._handed_out.all_acknowledged()
        await self.close()

    async def unsubscribe(self, *, force: bool = False) -> None:
        """End the subscription on this segment, and close.

        Raises the broker's error.
        """
        connection = await self._wait_attached()
        self._send_acks()
        await connection.request(unsubscribe_of(self.consumer_id, force=force))
        await self.close()


def _forget(connection: Connection, asked: Sequence[int]) -> None:
    """Forget requests whose answers are not awaited any more."""
    for request_id in asked:
        connection.forget(request_id)
