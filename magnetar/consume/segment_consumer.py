"""One SUBSCRIBE: a consumer of one segment, and its timer of redeliveries."""

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
    """The segment that is subscribed to."""

    @property
    def segment_id(self) -> int:
        """Its id in the topic."""

    @property
    def topic(self) -> str:
        """The name to attach to."""


class RedeliveryTimer:
    """The one timer by which a segment consumer asks its broker for messages again.

    Rules: what was negatively acknowledged is asked for when its delay is over (`Redelivery`),
    what is not acknowledged in time when that is (`ProcessingTimeouts`). An entry that is asked
    for waits for nothing else any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: SubscribeSettings,
        tracker: AckTracker,
        ask: Callable[[Mapping[EntryKey, int]], None],
    ) -> None:
        """`ask` is called with entries and bits; of whole ones it says so by `asked`."""
        delay, timeout_ms = settings.nack_delay, settings.processing_timeout_ms
        self.nacked: Final = Redelivery(delay.min_ms, delay.max_ms, delay.multiplier)
        self.timeouts: Final = ProcessingTimeouts(timeout_ms) if timeout_ms else None
        """The processing timeouts; None if there are none."""
        self._loop = loop
        self._tracker = tracker
        self._request_messages = ask
        self._handle: asyncio.TimerHandle | None = None
        self._at_ms = 0
        """When `_handle` is called."""

    def nack(self, keys: Sequence[EntryKey], redelivery_count: int, index: int = -1) -> None:
        """Ask for entries when their delay is over, for the message of this index."""
        self.nacked.add(keys, redelivery_count, self._now_ms(), index)
        self._aim(self.nacked.next_ms)

    def handed_out(self, key: EntryKey, index: int) -> None:
        """The time of a message begins, if there is a timeout."""
        if self.timeouts is not None:
            due_ms = self.timeouts.handed_out(key, index, self._now_ms())
            if self._handle is None or due_ms < self._at_ms:
                self._aim(due_ms)

    def ends(self, message_id: EntryId) -> bool:
        """The time of a message ends; whether it had begun."""
        timeouts = self.timeouts
        return timeouts is not None and timeouts.end(message_id.key, message_id.batch_index)

    def asked(self, keys: Sequence[EntryKey]) -> None:
        """Forget the delays and timeouts of entries that are asked for."""
        for key in keys:
            self.nacked.forget(key)
        if self.timeouts is not None:
            self.timeouts.end_all(keys)

    def attached(self) -> None:
        """The broker delivers everything again; what the application has keeps its time."""
        self.nacked.clear()

    def clear(self) -> None:
        """The broker delivers everything again anyway, or nothing any more."""
        self.nacked.clear()
        if self.timeouts is not None:
            self.timeouts.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _aim(self, due_ms: int | None) -> None:
        """At this time, unless it is sooner."""
        if due_ms is None or (self._handle is not None and self._at_ms <= due_ms):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_ms = due_ms
        wait_s = max(0, due_ms - self._now_ms()) / 1000
        self._handle = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        """Ask for what is due, all at once."""
        self._handle = None
        now_ms = self._now_ms()
        due = self.nacked.due(now_ms)
        if self.timeouts is not None:
            for late in self.timeouts.due(now_ms):
                due.update(dict.fromkeys(self._tracker.entries_of(EntryId(*late)), -1))
            self._aim(self.timeouts.next_ms)
        if due:
            self._request_messages(due)
        self._aim(self.nacked.next_ms)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)


class SegmentConsumer(Attachment):
    """A consumer of one segment: one SUBSCRIBE, over reconnects.

    - Messages are asked for when it is attached and when the application takes them (`Permits`).
    - A plain acknowledgement is in the group when `acknowledge` returns; the group leaves at the
      latest after `ack_grouping_ms`. What waits when the connection is lost leaves on the next one.
      The broker answers each group, for those who wait for its word (`AckAnswers`). In a
      transaction the result is awaited, and the broker's answer with it. Cancelling who waits
      changes nothing.
    - On a new attachment the broker delivers again whatever is not acknowledged. So what waits in
      the inbox is dropped; what was handed out stays acknowledgeable, and of what is shared it is
      not handed out a second time while the application has it (`AckTracker`). What is not
      durable keeps its inbox and goes on behind the last message that was put there.
    - Failing for good is told to `on_failure`; without one the inbox fails.
    - It counts and logs what cannot be unpacked (`damaged`).
    - What is acknowledged in a transaction has no timeout any more: the broker brings it back if
      that aborts. If the acknowledgement fails the timeout begins anew.
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
        """The broker has said that the topic is terminated and everything acknowledged."""
        self.damaged = 0
        """Entries that could not be unpacked."""
        self.on_end: Callable[[SegmentConsumer], None] | None = None
        self.on_failure: Callable[[SegmentConsumer], None] | None = None
        self._inbox = inbox
        self._permits = Permits(settings.receiver_queue_size)
        self._shared = settings.durable and settings.kind is not SubscriptionKind.EXCLUSIVE
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
        """The last that was put into the inbox."""
        self._decoder = self._new_decoder()
        in_order = settings.durable and settings.kind is not SubscriptionKind.SHARED
        self._handed_out = OutstandingMessages() if in_order else None
        self._answering = BackgroundTasks()
        self._losses = 0
        """How often the attachment was lost."""
        self._epoch = 0
        self._leaving = False
        self._acks_due: asyncio.TimerHandle | None = None
        self._up = asyncio.Event()
        """Set while it is attached, and when it will not be again."""

    # Attachment

    def describe(self) -> str:
        """Name the consumer for error messages."""
        return f"The consumer of {self.segment.topic} in {self.settings.subscription!r}"

    async def find(self) -> Connection:
        """The broker that serves the segment."""
        return await self.context.pool.of_topic(self.segment.topic)

    async def attach(self, connection: Connection) -> None:
        """SUBSCRIBE."""
        connection.attach(PeerKind.CONSUMER, self.consumer_id, self)
        after = self._start_position()
        await connection.request(
            subscribe_of(self.segment.topic, self.consumer_id, self._epoch, self.settings, after)
        )

    def attached(self) -> None:
        """Send the acknowledgements that wait, and ask for messages."""
        self._up.set()
        self._send_acks()
        self._request_messages()

    def detached(self, error: MagnetarError) -> None:
        """Forget what waits in the inbox, as it comes again."""
        self._up.clear()
        self._losses += 1
        self._answers.lost(error)
        self._reset_for_attachment()

    def failed(self, error: MagnetarError) -> None:
        """Tell everybody who waits: it will not be attached again."""
        self._up.set()
        self._answers.over(error)
        if self._handed_out is not None:
            self._handed_out.give_up()
        if self.on_failure is not None:
            self.on_failure(self)
        else:
            self._inbox.fail(error)

    async def leave(self, connection: Connection) -> None:
        """The last acknowledgements, then CLOSE_CONSUMER; their answers may come behind it."""
        if self.state is AttachmentState.CLOSED:
            self._write_acks(connection)
        await connection.request(close_of(self.consumer_id), LEAVE_S)
        if self.state is AttachmentState.CLOSED and (awaited := self._answers.awaited):
            await asyncio.wait(awaited)

    async def close(self) -> None:
        """Acknowledge what was acknowledged, give back everything else, and end."""
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
        """A new attachment: the broker knows of no permits."""
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
            # Pieces that came before the last message of the inbox do not come again.
            kept = self._permits.waiting
        self._permits.reset()
        self._permits.keep(kept)
        (self._timer.attached if self._shared else self._timer.clear)()
        self._decoder = self._new_decoder()

    def _start_position(self) -> EntryId | None:
        """Where what is not durable goes on."""
        return self.settings.start_after if self._last is None else self._last.entry_id

    def _new_decoder(self) -> "Decoder[SegmentConsumer]":
        if self.settings.durable:
            return Decoder(self, self._chunks, self._tracker)
        return Decoder(self, self._chunks, None, self._start_position())

    # Handler

    def received(self, frame: Frame) -> None:
        """Handler: what the broker sends."""
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
        if self._epoch and from_wire(message.consumer_epoch) < self._epoch:
            # Sent before the broker knew that everything was asked for again.
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

    def _report_problems(
        self, decoded: "DecodedEntry[SegmentConsumer]", redelivery_count: int
    ) -> None:
        """Report what is not a message as it should be."""
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
        """Inbox: a message is handed out."""
        if self._handed_out is not None:
            self._handed_out.add(received)
        elif received.entry.chunks and not self.settings.durable:
            self._chunks.passed(received.entry.key)
        if self._permits.taken():
            self._request_messages()

    def taken_back(self, received: RawMessage[object]) -> None:
        """Inbox: it was not handed out after all."""
        self._permits.keep(1)
        if self._handed_out is not None:
            self._handed_out.take_back(received)
        elif received.entry.chunks and not self.settings.durable:
            self._chunks.waits(received.entry.chunks)

    def room(self) -> None:
        """Inbox: more may be asked for."""
        self._request_messages()

    def _request_messages(self) -> None:
        connection = self.connection
        if connection is None or connection.is_lost or self._leaving:
            # Of a lost one others may hear before this does: it asks again when it is attached.
            return
        if self._inbox.is_full:
            self._inbox.when_room(self)
            return
        permits = self._permits.to_ask()
        if permits:
            connection.send(flow_of(self.consumer_id, permits))

    # Acknowledgements

    def acknowledge(
        self, message_id: EntryId, transaction: AckTransaction | None = None
    ) -> Awaitable[None]:
        """Acknowledge one message.  The class says when that is over.

        Raises `AlreadyClosed`; in a transaction what the broker refuses it with
        (`TransactionConflict`), and what the transaction raises; `InvalidArgument` for an id that
        lacks the size of its batch.
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
            # It is not known which they are if they were asked for again.
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
        """A message and all before it; for those that are not shared.  As `acknowledge`."""
        self._check_open()
        message_id = self._tracker.sized(message_id)
        if transaction is not None:
            return self._acknowledge_in_transaction(transaction, message_id, up_to=True)
        out = self._handed_out
        found = out.acknowledged_up_to(message_id) if out is not None else []
        self._chunks.passed(message_id.key)
        if self._chunks.open_across(message_id.key) is None:
            self._tracker.acknowledge_up_to(message_id)
        else:
            # The first pieces of a message that goes on behind this one must stay at the broker.
            for each in {message_id, *found}:
                self._acknowledge(each.key, each.batch_index, each.batch_size)
        self._schedule_acks()
        return DONE

    def before_open(self, last: EntryId) -> EntryId:
        """Return where to read on after `last`: before a chunked message that lies across it."""
        first = self._chunks.open_across(last.key)
        return last if first is None else EntryId(first[0], first[1] - 1)

    async def confirmed(self) -> None:
        """Wait until the broker has confirmed what was acknowledged before.

        Raises what the broker refuses it with, `ConnectionLost`, `OperationTimedOut`: then it is
        not known.  `AlreadyClosed`: it was not sent.  Cancelling it changes nothing.
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
        """Wait, at the latest until the operation timeout is over: `OperationTimedOut`."""
        limit_s = self.context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as error:
            if isinstance(error, MagnetarError):
                raise
            raise OperationTimedOut(
                f"{self.describe()} had no connection, or no answer, for {limit_s:g} s; look "
                "whether the brokers are well, or allow more by operation_timeout_s."
            ) from (self.error or error)

    def _acknowledge_in_transaction(
        self, transaction: AckTransaction, message_id: EntryId, *, up_to: bool = False
    ) -> Awaitable[None]:
        """Nothing is begun before the transaction has taken it: a refusal leaves no trace."""
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
        in_time = self._timer.ends(message_id)
        task = self._answering.start(
            self._send_when_joined(said, commands, losses if up_to else None)
        )

        def over(task: asyncio.Task[None]) -> None:
            came_again = not up_to and self._tracker.settle(message_id)
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                # A later attachment may be on the same connection; there the message comes again.
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
        # As without a transaction: first pieces must stay at the broker.
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
            # Another consumer may have the segment meanwhile, and be done with some of it.
            raise ConnectionLost(
                f"{self.describe()} was lost before the acknowledgement was sent: abort the "
                "transaction, everything comes again."
            )
        connection = await self._wait_attached()
        await asyncio.gather(*(connection.request(command) for command in commands))

    def _record_acknowledged(self, message_id: EntryId, *, up_to: bool) -> None:
        if self._handed_out is not None and up_to:
            self._handed_out.acknowledged_up_to(message_id)
        elif self._handed_out is not None:
            self._handed_out.acknowledged(message_id)

    async def _wait_attached(self) -> Connection:
        """The connection, when it is attached.

        Raises why it will not be, `AlreadyClosed`, `OperationTimedOut`.
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
        return AlreadyClosed(
            f"{self.describe()} is closed; the message comes again to whoever subscribes."
        )

    def _schedule_acks(self) -> None:
        """Send the group, now or when its time is up."""
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

    # Again

    def begin_processing(self, received: RawMessage[object]) -> None:
        """The application has a message now.  It comes again unless it is done with in time."""
        if self.state is AttachmentState.ATTACHED:
            self._timer.handed_out(received.entry.key, received.batch_index)

    def nack_handed_out(self, message_id: EntryId, redelivery_count: int) -> None:
        """As `nack`, of what `begin_processing` was told of, if there is a timeout.

        What was asked for since then is not asked for once more: its count would go up twice.
        """
        if self._timeouts is None or self._timer.ends(message_id):
            self.nack(message_id, redelivery_count)

    def nack(self, message_id: EntryId, redelivery_count: int) -> None:
        """Ask for a message again, after a delay that grows with each redelivery.

        What is shared must be in hand: what a transaction acknowledges comes with its abort.
        """
        if self._shared and not self._tracker.is_in_hand(message_id):
            return
        keys = self._tracker.entries_of(message_id)
        self._redeliver_later(keys, redelivery_count, message_id.batch_index)

    def redeliver(self, message_ids: Sequence[EntryId]) -> None:
        """Ask for messages again now; what is exclusive asks for everything."""
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
            # Only here: a SUBSCRIBE under way has the epoch that its messages will have.
            self._epoch += 1
            self.connection.send(redeliver_all_of(self.consumer_id, self._epoch))
            self._request_messages()

    def _redeliver(self, messages: Mapping[EntryKey, int]) -> None:
        """Entries and bits.  What of them waits in the inbox comes again too."""
        connection = self.connection
        self._tracker.give_back(messages.items())
        if connection is None or connection.is_lost:
            return  # it comes with the next attachment
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
        """Hand out nothing more; close when what was handed out is acknowledged.

        That waits for the application, without limit.  For what is not shared.
        """
        self._leaving = True
        self._inbox.drop(self)
        if self._handed_out is not None:
            await self._handed_out.all_acknowledged()
        await self.close()

    async def unsubscribe(self, *, force: bool = False) -> None:
        """End the subscription on this segment, and close.

        Raises what the broker refuses it with.
        """
        connection = await self._wait_attached()
        self._send_acks()
        await connection.request(unsubscribe_of(self.consumer_id, force=force))
        await self.close()


def _forget(connection: Connection, asked: Sequence[int]) -> None:
    """Forget requests whose answers are not awaited any more."""
    for request_id in asked:
        connection.forget(request_id)
