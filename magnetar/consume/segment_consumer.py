"""One SUBSCRIBE: a consumer of one segment.

Signatures for whoever builds on it:

    SegmentConsumer(context, segment, how: SubscribeSettings, inbox)   segment: .segment_id, .topic
    await open(timeout_s), await close()                               as every `Attachment`
    acknowledge(id, transaction=None), acknowledge_up_to(id, transaction=None) -> Awaitable[None]
    await confirmed()                       everything acknowledged so far is known to the broker
    begin_processing(received)              handed out: `how.processing_timeout_ms` begins
    nack(id, redelivery_count)              asked for again after the delay of `how.nack_delay`
    nack_handed_out(id, redelivery_count)   unless that was done since it was handed out
    redeliver(ids)                          asked for again now; of an exclusive one: everything
    await leave_in_order(); await unsubscribe(force)
    on_end, on_failure: Callable[[SegmentConsumer], None] | None       to be set by its owner
    ended, damaged, segment, how, connection, error

Rules:

- Messages are asked for when it is attached and when the application takes them (`permits.py`).
- A plain acknowledgement is in the group when `acknowledge` returns; the group leaves at the latest
  after `ack_grouping_ms`.  What waits when the connection is lost leaves on the next one.  The
  broker answers each group, for those who wait for its word (`ack_answers.py`).  In a transaction
  the result is awaited, and the broker's answer with it.  Cancelling who waits changes nothing.
- On a new attachment the broker delivers again whatever is not acknowledged.  So what waits in the
  inbox is dropped; what was handed out stays acknowledgeable.  What is not durable keeps its inbox
  and goes on behind the last message that was put there.
- Failing for good is told to `on_failure`; without one the inbox fails.
- It counts and logs what cannot be unpacked (`damaged`).
- What is acknowledged in a transaction has no timeout any more: the broker brings it back if that
  aborts.  If the acknowledgement fails the timeout begins anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar, cast

from magnetar.bounds import LEAVE_S, MAX_ACK_GROUP, MAX_UNCOMPRESSED_BYTES
from magnetar.consume.ack_answers import DONE, AckAnswers
from magnetar.consume.ack_tracker import Acknowledgement, AckTracker
from magnetar.consume.ack_transaction import AckTransaction, Subscribed
from magnetar.consume.chunk_assembly import ChunkAssembly
from magnetar.consume.consumer_commands import (
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
from magnetar.consume.consumer_settings import SubscribeSettings, SubscriptionKind
from magnetar.consume.decoding import Decoded, Decoder, permits_of
from magnetar.consume.handed_out import HandedOut
from magnetar.consume.inbox import Inbox
from magnetar.consume.outcomes import awaited_or_not
from magnetar.consume.permits import Permits
from magnetar.consume.received import EntryKey, Received
from magnetar.consume.redelivery_timer import RedeliveryTimer
from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, MagnetarError, OperationTimedOut, ServiceNotReady
from magnetar.message_id import EntryId
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection, PeerKind
from protocol import pulsar_pb2 as pb
from protocol.frames import Frame
from protocol.ids import from_wire

__all__ = ["DONE", "AckTransaction", "SegmentConsumer", "Subscribed"]

R = TypeVar("R")
_log = logging.getLogger(__name__)
_MESSAGE: Final = pb.BaseCommand.MESSAGE


class SegmentConsumer(Attachment):
    """See the module's rules."""

    def __init__(
        self,
        context: ClientContext,
        segment: Subscribed,
        how: SubscribeSettings,
        inbox: "Inbox[SegmentConsumer]",
    ) -> None:
        super().__init__(context)
        self.segment: Final = segment
        self.how: Final = how
        self.consumer_id: Final = context.ids.consumer_id()
        self.ended = False
        """The broker has said that the topic is terminated and everything acknowledged."""
        self.damaged = 0
        """Entries that could not be unpacked."""
        self.on_end: Callable[[SegmentConsumer], None] | None = None
        self.on_failure: Callable[[SegmentConsumer], None] | None = None
        self._inbox = inbox
        self._permits = Permits(how.receiver_queue_size)
        self._tracker = AckTracker()
        self._answers = AckAnswers()
        self._chunks = ChunkAssembly(
            how.max_pending_chunked_messages,
            how.expire_chunked_after_ms,
            MAX_UNCOMPRESSED_BYTES,
            max_bytes=how.max_pending_chunked_bytes,
            in_order=how.kind is SubscriptionKind.EXCLUSIVE,
        )
        self._again = RedeliveryTimer(context.loop, how, self._tracker, self._redeliver)
        self._nacked = self._again.nacked
        self._timeouts = self._again.timeouts
        self._last: Received[SegmentConsumer] | None = None
        """The last that was put into the inbox."""
        self._decoder = self._new_decoder()
        in_order = how.durable and how.kind is not SubscriptionKind.SHARED
        self._handed_out = HandedOut() if in_order else None
        self._answering: set[asyncio.Task[None]] = set()
        """What is acknowledged in transactions and not answered yet."""
        self._epoch = 0
        self._leaving = False
        self._acks_due: asyncio.TimerHandle | None = None
        self._up = asyncio.Event()
        """Set while it is attached, and when it will not be again."""

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"The consumer of {self.segment.topic} in {self.how.subscription!r}"

    async def find(self) -> Connection:
        """The broker that serves the segment."""
        return await self.context.pool.of_topic(self.segment.topic)

    async def attach(self, connection: Connection) -> None:
        """SUBSCRIBE."""
        connection.attach(PeerKind.CONSUMER, self.consumer_id, self)
        after = self._start()
        await connection.request(
            subscribe_of(self.segment.topic, self.consumer_id, self._epoch, self.how, after)
        )

    def attached(self) -> None:
        """What waits is sent; messages are asked for."""
        self._up.set()
        self._send_acks()
        self._ask()

    def detached(self, error: MagnetarError) -> None:
        """What waits in the inbox will come again."""
        self._up.clear()
        self._answers.lost(error)
        self._begin_anew()

    def failed(self, error: MagnetarError) -> None:
        """It will not be attached again."""
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
        self._again.clear()
        if self._handed_out is not None:
            self._handed_out.give_up()
        self._leaving = True
        self._inbox.drop(self)
        self._up.set()
        try:
            await super().close()
        finally:
            self._answers.over(self._closed_error())

    def _begin_anew(self) -> None:
        """A new attachment: the broker knows of no permits."""
        kept = 0
        if self.how.durable:
            self._inbox.drop(self)
            self._tracker.attached()
            self._chunks.clear()
            if self._handed_out is not None:
                self._handed_out.attached()
        else:
            # Pieces that came before the last message of the inbox do not come again.
            kept = self._permits.waiting
        self._permits.reset()
        self._permits.keep(kept)
        self._again.clear()
        self._decoder = self._new_decoder()

    def _start(self) -> EntryId | None:
        """Where what is not durable goes on."""
        return self.how.start_after if self._last is None else self._last.entry_id

    def _new_decoder(self) -> "Decoder[SegmentConsumer]":
        if self.how.durable:
            return Decoder(self, self._chunks, self._tracker)
        return Decoder(self, self._chunks, None, self._start())

    # Handler

    def received(self, frame: Frame) -> None:
        """Handler: what the broker sends."""
        kind = frame.command.type
        if kind == _MESSAGE:
            self._message(frame)
        elif kind == pb.BaseCommand.CLOSE_CONSUMER:
            self.again(ServiceNotReady(f"The broker has closed {self.describe()}; it comes back."))
        elif kind == pb.BaseCommand.REACHED_END_OF_TOPIC and not self.ended:
            self.ended = True
            if self.on_end is not None:
                self.on_end(self)

    def _message(self, frame: Frame) -> None:
        message = frame.command.message
        if self._leaving:
            return
        if self._epoch and from_wire(message.consumer_epoch) < self._epoch:
            # Sent before the broker knew that everything was asked for again.
            self._permits.arrived(permits_of(frame.entry), 0)
            self._ask()
            return
        decoded = self._decoder.decode(message, frame.entry, self.context.now_ms())
        messages = decoded.messages
        self._permits.arrived(decoded.permits, len(messages))
        if messages:
            self._last = messages[-1]
            self._inbox.put(self, messages)
        if decoded.why or decoded.again or decoded.too_old or decoded.failure:
            self._rare(decoded, message.redelivery_count)
        self._ask()

    def _rare(self, decoded: "Decoded[SegmentConsumer]", redelivery_count: int) -> None:
        """What is not a message as it should be."""
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
        if not self.how.durable:
            return
        if decoded.damage is not None and self.connection is not None:
            self.connection.send(damage_of(self.consumer_id, decoded.key, decoded.damage))
        for key in decoded.too_old:
            self._tracker.acknowledge_entry(key)
        if decoded.too_old:
            self._acknowledged()
        if decoded.again and self.how.kind is not SubscriptionKind.EXCLUSIVE:
            self._ask_later(decoded.again, redelivery_count)

    # Permits

    def taken(self, received: Received[object]) -> None:
        """Inbox: a message is handed out."""
        if self._handed_out is not None:
            self._handed_out.add(received)
        elif received.entry.chunks and not self.how.durable:
            self._chunks.passed(received.entry.key)
        if self._permits.taken():
            self._ask()

    def taken_back(self, received: Received[object]) -> None:
        """Inbox: it was not handed out after all."""
        self._permits.keep(1)
        if self._handed_out is not None:
            self._handed_out.take_back(received)
        elif received.entry.chunks and not self.how.durable:
            self._chunks.waits(received.entry.chunks)

    def room(self) -> None:
        """Inbox: more may be asked for."""
        self._ask()

    def _ask(self) -> None:
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
        """One message.  See the module's rules for when that is over.

        Raises `AlreadyClosed`; in a transaction what the broker refuses it with
        (`TransactionConflict`), and what the transaction raises; `InvalidArgument` for an id that
        lacks the size of its batch.
        """
        self._check_open()
        message_id = self._tracker.sized(message_id)
        if transaction is not None:
            return self._in_transaction(transaction, message_id)
        self._acknowledge(message_id.key, message_id.batch_index, message_id.batch_size)
        if self._handed_out is not None:
            self._handed_out.acknowledged(message_id)
        return DONE

    def acknowledge_received(self, received: Received[object]) -> None:
        """The same of what is shared, without a transaction, in less time."""
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
            self._acknowledged()

    def acknowledge_up_to(
        self, message_id: EntryId, transaction: AckTransaction | None = None
    ) -> Awaitable[None]:
        """A message and all before it; for those that are not shared.  As `acknowledge`."""
        self._check_open()
        message_id = self._tracker.sized(message_id)
        if transaction is not None:
            return self._in_transaction(transaction, message_id, up_to=True)
        out = self._handed_out
        found = out.acknowledged_up_to(message_id) if out is not None else []
        self._chunks.passed(message_id.key)
        if self._chunks.open_across(message_id.key) is None:
            self._tracker.acknowledge_up_to(message_id)
        else:
            # The first pieces of a message that goes on behind this one must stay at the broker.
            for each in {message_id, *found}:
                self._acknowledge(each.key, each.batch_index, each.batch_size)
        self._acknowledged()
        return DONE

    def before_open(self, last: EntryId) -> EntryId:
        """From where reading goes on that has come to `last`: before messages across that place."""
        first = self._chunks.open_across(last.key)
        return last if first is None else EntryId(first[0], first[1] - 1)

    async def confirmed(self) -> None:
        """Until the broker has confirmed what was acknowledged before.

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
        await self._in_time(outcome)

    async def _in_time(self, work: Awaitable[R]) -> R:
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

    def _in_transaction(
        self, transaction: AckTransaction, message_id: EntryId, *, up_to: bool = False
    ) -> Awaitable[None]:
        """Nothing is begun before the transaction has taken it: what it refuses never happened."""
        said = transaction.acknowledging_on(self.segment.topic, self.how.subscription)
        outcome: asyncio.Future[None] = self.context.loop.create_future()
        transaction.track(cast("asyncio.Future[object]", outcome))
        held: Sequence[Acknowledgement] = ()
        if up_to:
            commands = self._commands_up_to(message_id, transaction.id)
        else:
            held = self._tracker.hold(message_id)
            commands = list(acks_of(self.consumer_id, held, transaction.id))
        attachment, in_time = self.connection, self._again.ends(message_id)
        task = self.context.loop.create_task(self._answered(said, commands))
        self._answering.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._answering.discard(task)
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                if attachment is not None and attachment is self.connection:
                    self._tracker.let_go(held)
                    if in_time:
                        self._again.handed_out(message_id.key, message_id.batch_index)
                outcome.set_exception(error)
            else:
                self._was_acknowledged(message_id, up_to=up_to)
                outcome.set_result(None)

        task.add_done_callback(over)
        return awaited_or_not(outcome)

    def _commands_up_to(
        self, message_id: EntryId, transaction: tuple[int, int]
    ) -> list[pb.BaseCommand]:
        out = self._handed_out
        found = out.said_up_to(message_id) if out is not None else []
        # As without a transaction: first pieces must stay at the broker.
        first = self._chunks.open_across(message_id.key)
        up_to, single = self._tracker.hold_up_to(message_id, found, first)
        return list(acks_up_to_of(self.consumer_id, up_to, single, transaction))

    async def _answered(
        self, said: asyncio.Future[None] | None, commands: Sequence[pb.BaseCommand]
    ) -> None:
        if said is not None:
            await asyncio.shield(said)
        connection = await self._until_up()
        await asyncio.gather(*(connection.request(command) for command in commands))

    def _was_acknowledged(self, message_id: EntryId, *, up_to: bool) -> None:
        if self._handed_out is not None and up_to:
            self._handed_out.acknowledged_up_to(message_id)
        elif self._handed_out is not None:
            self._handed_out.acknowledged(message_id)

    async def _until_up(self) -> Connection:
        """The connection, when it is attached.

        Raises why it will not be, `AlreadyClosed`, `OperationTimedOut`.
        """
        connection = self.connection
        return connection if connection is not None else await self._in_time(self._connected())

    async def _connected(self) -> Connection:
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

    def _acknowledged(self) -> None:
        """Something is in the group."""
        if self._tracker.waiting >= MAX_ACK_GROUP or not self.how.ack_grouping_ms:
            self._send_acks()
        elif self._acks_due is None:
            self._acks_due = self.context.loop.call_later(
                self.how.ack_grouping_ms / 1000, self._send_acks
            )

    def _send_acks(self) -> None:
        if self._acks_due is not None:
            self._acks_due.cancel()
            self._acks_due = None
        if self.connection is not None:
            self._write_acks(self.connection)

    def _write_acks(self, connection: Connection) -> None:
        if self.how.durable and not connection.is_lost and self._tracker.waiting:
            commands = self._commands_of_group()
            asked: list[int] = []
            answered = self._answers.sent(len(commands), partial(_forget, connection, asked))
            asked += [connection.ask(command, answered) for command in commands]

    def _commands_of_group(self) -> list[pb.BaseCommand]:
        up_to, single = self._tracker.take()
        commands = list(acks_of(self.consumer_id, single))
        if up_to is not None:
            commands.append(cumulative_ack_of(self.consumer_id, up_to))
        return commands

    # Again

    def begin_processing(self, received: Received[object]) -> None:
        """The application has a message now.  It comes again unless it is done with in time."""
        if self.state is AttachmentState.ATTACHED:
            self._again.handed_out(received.entry.key, received.batch_index)

    def nack_handed_out(self, message_id: EntryId, redelivery_count: int) -> None:
        """As `nack`, of what `begin_processing` was told of, if there is a timeout.

        What was asked for since then is not asked for once more: its count would go up twice.
        """
        if self._timeouts is None or self._again.ends(message_id):
            self.nack(message_id, redelivery_count)

    def nack(self, message_id: EntryId, redelivery_count: int) -> None:
        """Ask for a message again, after a delay that grows with each redelivery."""
        keys = self._tracker.entries_of(message_id)
        self._ask_later(keys, redelivery_count, message_id.batch_index)

    def redeliver(self, message_ids: Sequence[EntryId]) -> None:
        """Ask for messages again now; what is exclusive asks for everything."""
        if self.how.kind is SubscriptionKind.EXCLUSIVE:
            self._redeliver_all()
        else:
            keys = [key for each in message_ids for key in self._tracker.entries_of(each)]
            self._redeliver(keys)

    def _redeliver_all(self) -> None:
        self._send_acks()
        self._epoch += 1
        self._permits.taken(self._inbox.drop(self))
        self._chunks.clear()
        if self.connection is not None and not self.connection.is_lost:
            self.connection.send(redeliver_all_of(self.consumer_id, self._epoch))
            self._ask()

    def _redeliver(self, keys: Sequence[EntryKey]) -> None:
        """What of these entries waits in the inbox comes again as well."""
        connection = self.connection
        if connection is None or connection.is_lost or not keys:
            return
        self._send_acks()
        self._again.asked(keys)
        self._permits.taken(self._inbox.drop(self, frozenset(keys)))
        self._tracker.ask_again(keys)
        for command in redelivers_of(self.consumer_id, keys):
            connection.send(command)
        self._ask()

    def _ask_later(self, keys: Sequence[EntryKey], redelivery_count: int, index: int = -1) -> None:
        if self.state is AttachmentState.ATTACHED:
            self._again.nack(keys, redelivery_count, index)

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
        connection = await self._until_up()
        self._send_acks()
        await connection.request(unsubscribe_of(self.consumer_id, force=force))
        await self.close()


def _forget(connection: Connection, asked: Sequence[int]) -> None:
    """These requests will not be answered, or nobody wants to know."""
    for request_id in asked:
        connection.forget(request_id)
