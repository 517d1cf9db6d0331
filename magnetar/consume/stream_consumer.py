"""`StreamConsumer[T]`, which reads its share of a topic's segments, each in order."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from magnetar.bounds import INBOX_SEGMENTS, MISSING_SEGMENT_TRIES
from magnetar.consume.acknowledgements import (
    DONE,
    AckTransaction,
    Outcomes,
    cannot_commit,
    start_now,
)
from magnetar.consume.assignments import AssignedSegment, Assignment
from magnetar.consume.delivery_log import DeliveryLog, SharedEntryId
from magnetar.consume.message import Message, RawMessage
from magnetar.consume.ordered_acks import ObservedTransaction, OrderedAcks
from magnetar.consume.ordered_segments import (
    ControllerSession,
    HeldSegments,
    OrderedInbox,
    OrderedSegment,
)
from magnetar.consume.receiving import InboxConsumer, check_message, random_name
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import StreamSettings
from magnetar.consume.shared_segment import SharedSegment
from magnetar.context import ClientContext, check_loop
from magnetar.errors import (
    AlreadyClosed,
    InvalidArgument,
    MagnetarError,
    OperationTimedOut,
    ServiceNotReady,
    TransactionConflict,
    TransactionFailed,
)
from magnetar.message_id import EntryId, Positions
from magnetar.protocol.txn_id import TxnId
from magnetar.schema.schema import Schema
from magnetar.schema.schema_reader import SchemaReader
from magnetar.wire.attachment import AttachmentState

__all__ = ["StreamConsumer"]


T = TypeVar("T")


class _MessageRedelivered(Exception):
    """The taken message must not be handed out, as everything comes again."""


class StreamConsumer(InboxConsumer[T, SegmentConsumer]):
    """A consumer of a share of the segments of a topic, each in order.

    Made by `Client.stream_consumer`.

    Each message carries a position vector: the last message of each segment that was handed out
    before it.  Acknowledging the message acknowledges all of them.  The messages of a child segment
    come after those of its parents, as the controller assigns a child when its parents are
    acknowledged.

    A segment that goes to another consumer is closed when the application has acknowledged all
    messages that it got, at the latest after `hand_over_timeout_s`; the other consumer gets the
    rest again.  If such messages are then acknowledged in a transaction, that raises, as the other
    consumer will process them again; without a transaction they are skipped.

    When a transaction with an acknowledgement of this consumer does not commit, all unacknowledged
    messages are handed out again, in order.  Messages received before that can not be acknowledged
    any more: this raises `TransactionConflict`.  If the application gives up messages before it
    acknowledges them in the transaction, it must call `redeliver_unacknowledged`.

    Where a subscription has more consumers than the topic has segments, consumers share a segment
    (PIP-486): each key still goes to one of them at a time, in order.  The position of a shared
    segment in a vector stands for the messages that this consumer handed out until then.

    Only one transaction at a time can acknowledge on a segment; another one raises
    `TransactionConflict`.  If the topic no longer exists, the consumer fails after a while.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        schema: Schema[T],
        settings: StreamSettings,
        create_if_missing: bool = True,
    ) -> None:
        """Raises `InvalidTopicName`, `InvalidArgument`."""
        limit = settings.receiver_queue_size * INBOX_SEGMENTS
        self._ordered_inbox = OrderedInbox(limit, settings.receiver_queue_bytes, self)
        super().__init__(self._ordered_inbox)
        settings.of_segment(subscription, "-", 0, None)
        self._context = context
        self._subscription = subscription
        self._given_schema = schema
        self._schema = schema
        self._settings = settings
        self.name: Final = settings.consumer_name or random_name(context, "stream-")
        """The name of the consumer at the controller."""
        self._incarnation: Final = random_name(context, "", 16)
        self._session = ControllerSession(
            context, topic, subscription, self.name, create_if_missing=create_if_missing
        )
        self._session.on_assignment(self._assigned)
        self._session.on_failure(self.failed)
        self._held = HeldSegments(context, self)
        self._vector: Positions = MappingProxyType({})
        self._lost: set[int] = set()
        """Segments of the vector that were lost before everything was acknowledged."""
        self._acks = OrderedAcks()
        self._logs: dict[int, DeliveryLog] = {}
        """The messages handed out of segments that are, or were, shared."""
        self.times_back = 0
        """The number of redeliveries of everything."""
        self.on_going_back: Callable[[], None] | None = None
        """Called when everything comes again, except by `redeliver_unacknowledged`."""
        self._failure: MagnetarError | None = None

    @property
    def topic(self) -> str:
        """The topic's name, as the broker resolved it: `topic://...`."""
        return self._session.topic

    @property
    def segment_ids(self) -> frozenset[int]:
        """The ids of the assigned segments."""
        return self._held.ids

    @property
    def positions(self) -> Positions:
        """The last message of each segment that was handed out or is acknowledged."""
        return self._vector

    @property
    def failure(self) -> MagnetarError | None:
        """The error with which it has failed, or None."""
        return self._failure

    @property
    def is_all_acknowledged(self) -> bool:
        """Whether everything that was handed out is acknowledged."""
        return not any(self._has_unacknowledged(segment_id) for segment_id in self._vector)

    def is_acknowledged(self, positions: Positions) -> bool:
        """Whether everything up to these positions is acknowledged outside of open transactions."""
        return all(
            not self._is_open_in_log(segment_id, entry)
            if isinstance(entry, SharedEntryId)
            else self._acks.is_acknowledged(segment_id, entry, None)
            for segment_id, entry in positions.items()
        )

    def _is_open_in_log(self, segment_id: int, entry: EntryId) -> bool:
        log = self._logs.get(segment_id)
        return log is not None and log.is_open(entry)

    def _has_unacknowledged(self, segment_id: int) -> bool:
        log = self._logs.get(segment_id)
        if log is not None and not log.is_empty:
            return True
        return not self._acks.is_all_acknowledged(segment_id)

    async def open(self) -> None:
        """Register with the controller, and subscribe to the first assignment.

        Raises the broker's error, or `OperationTimedOut`.
        """
        timeout_s = self._context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._session.open(timeout_s)
                self._schema = self._given_schema.of_topic(SchemaReader(self._context, self.topic))
                await self._held.settled()
        except OperationTimedOut:
            raise
        except TimeoutError:
            raise OperationTimedOut(
                f"Consumer {self.name} of {self.topic} did not get all of its segments within "
                f"{timeout_s:g} s; check whether another consumer holds one, or raise "
                "operation_timeout_s."
            ) from None

    async def _close(self) -> None:
        self._inbox.clear()
        self._inbox.fail(AlreadyClosed(f"Consumer {self.name} is closed; open another one."))
        await asyncio.gather(self._session.close(), self._held.close())

    def ack(
        self,
        message: Message[T],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge this message and all that were handed out before it.

        This takes effect when it is called, awaited or not.  Without `wait` the acknowledgement is
        sent within `ack_grouping_ms`.  With `wait`, and always in a transaction, the result waits
        for the broker's answer.  Raises `AlreadyClosed`, and the broker's error if it waits.
        """
        check_message(message, self.topic)
        if not message.id.positions:
            raise InvalidArgument(
                f"Message {message.id} was not received by an ordered consumer; pass it to the "
                "consumer that received it."
            )
        return self.ack_positions(message.id.positions, transaction=transaction, wait=wait)

    def ack_positions(
        self,
        positions: Positions,
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge a position vector; see `ack`."""
        check_loop(self._loop)
        if self._closing is not None:
            raise AlreadyClosed(
                f"Consumer {self.name} is closed; the message goes to another consumer."
            )
        if transaction is not None:
            self.follow(transaction)
        try:
            said = [
                (consumer, segment_id, entry)
                for segment_id, entry in positions.items()
                if (consumer := self._to_acknowledge(segment_id, entry, transaction)) is not None
            ]
        except MagnetarError as error:
            if transaction is not None:
                cannot_commit(self._context, transaction, error)
            raise
        outcomes: list[Awaitable[None]] = []
        for consumer, segment_id, entry in said:
            if transaction is None:
                consumer.acknowledge_up_to(entry)
                if not isinstance(entry, SharedEntryId):
                    self._acks.record_ack(segment_id, entry, None)
                if wait:
                    outcomes.append(start_now(consumer.confirmed()))
                continue
            outcomes.append(consumer.acknowledge_up_to(entry, transaction))
            self._acks.record_ack(segment_id, entry, transaction.id)
            if isinstance(transaction, ObservedTransaction) and isinstance(
                consumer, OrderedSegment
            ):
                consumer.joined(transaction.id)
        if transaction is None and self._lost:
            self._forget_lost(positions)
        return Outcomes(outcomes) if outcomes else DONE

    def _to_acknowledge(
        self, segment_id: int, entry: EntryId, transaction: AckTransaction | None
    ) -> SegmentConsumer | None:
        """The consumer that must acknowledge an entry, or None.  Raises if it is refused."""
        if entry.batch_index >= 0 and not entry.batch_size:
            raise InvalidArgument(
                f"Id {entry} lacks the size of its batch; give the id of a received message."
            )
        id_of_it = None if transaction is None else transaction.id
        shared = isinstance(entry, SharedEntryId)
        if shared and not self._is_open_in_log(segment_id, entry):
            return None
        if not shared and self._acks.is_acknowledged(segment_id, entry, id_of_it):
            return None
        if (
            self._logs[segment_id].comes_again(entry)
            if shared
            else self._acks.awaits_redelivery(segment_id, entry)
        ):
            raise TransactionConflict(
                f"Message {entry} of segment {segment_id} comes again, as a transaction did not "
                "commit; acknowledge it when it is received again."
            )
        if id_of_it is not None and (holder := self._acks.holder(segment_id, id_of_it)) is not None:
            raise TransactionConflict(
                f"Transaction {TxnId(*holder)} acknowledges on segment {segment_id} of "
                f"{self.topic} and has not ended; end it before another one acknowledges there."
            )
        consumer = self._held.consumer_of(segment_id)
        if consumer is not None and consumer.state is AttachmentState.CLOSED:
            consumer = None
        if shared is not isinstance(consumer, SharedSegment):
            consumer = None  # The messages were given up when its use changed.
        if consumer is None and transaction is not None:
            raise AlreadyClosed(
                f"Segment {segment_id} of {self.topic} went to another consumer before this was "
                "acknowledged; abort the transaction, as it is delivered there again."
            )
        # The broker refuses a message of a shared segment that another consumer acknowledged.
        if transaction is not None and not shared and self._acks.may_be_duplicated(segment_id):
            raise TransactionConflict(
                f"Messages of segment {segment_id} of {self.topic} may be processed twice, as the "
                "connection or the segment was lost before they were acknowledged; abort the "
                "transaction."
            )
        return consumer

    # Transactions

    def follow(self, transaction: AckTransaction) -> None:
        """Follow a transaction: if it does not commit, unacknowledged messages come again."""
        if isinstance(transaction, ObservedTransaction) and self._acks.join_transaction(
            transaction
        ):
            transaction.when_over(partial(self._over, transaction.id))

    def _over(self, transaction: tuple[int, int], committed: bool) -> None:
        unanswered = () if committed else [t for s in self._segments() for t in s.unanswered]
        if unanswered and self._closing is None:
            # The broker may hold messages for such an acknowledgement until it has answered it.
            unanswered[0].add_done_callback(lambda _: self._over(transaction, committed))
            return
        entries = self._acks.end_transaction(transaction, committed=committed)
        if self._closing is not None:
            return
        if not committed:
            self._go_back()
        self._forget_lost({})
        for segment in self._segments():
            entry = entries.get(segment.segment.segment_id) if committed else None
            segment.over(transaction, entry)

    def redeliver_unacknowledged(self) -> None:
        """Hand out everything that is not acknowledged again, in order.

        Returns at once and is not awaited: `receive` has the messages when they come.  Messages
        received before can not be acknowledged any more.
        """
        check_loop(self._loop)
        self.times_back += 1
        self._acks.expect_redelivery()
        kept = (
            segment_id
            for segment_id in self._vector
            if (consumer := self._held.consumer_of(segment_id)) is not None
            and not isinstance(consumer, SharedSegment)
        )
        done = {segment_id: self._acks.acknowledged_up_to(segment_id) for segment_id in kept}
        self._vector = MappingProxyType(
            {i: entry for i, entry in done.items() if entry is not None}
        )
        self._lost.clear()
        for segment in self._segments():
            segment.redeliver_all()

    def _go_back(self) -> None:
        self.redeliver_unacknowledged()
        if self.on_going_back is not None:
            self.on_going_back()

    def _segments(self) -> list[OrderedSegment]:
        return [each for each in self._held.consumers if isinstance(each, OrderedSegment)]

    # Reader of OrderedSegment

    @property
    def in_doubt(self) -> bool:
        """See `OrderedAcks.in_doubt`."""
        return self._acks.in_doubt

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """See `OrderedAcks.is_settled`; of a shared segment, see `DeliveryLog.is_settled`."""
        if isinstance(self._held.consumer_of(segment_id), SharedSegment):
            return self._logs[segment_id].is_settled(entry)
        return self._acks.is_settled(segment_id, entry)

    def start_attachment(self, segment_id: int) -> None:
        """See `OrderedAcks.start_attachment`."""
        self._acks.start_attachment(segment_id)

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """See `OrderedAcks.record_first_arrival`."""
        self._acks.record_first_arrival(segment_id, entry)

    def restart_from_earlier(self, segment_id: int) -> None:
        """Request everything again, as a transaction that held earlier messages is over."""
        if self.in_doubt or self._closing is not None:
            return  # Requested when the transaction in doubt is over.
        for transaction in self._acks.transactions_on(segment_id):
            error = TransactionFailed(
                f"Segment {segment_id} of {self.topic} begins again at an earlier message, as "
                "another transaction did not commit; begin a new one with the messages that come "
                "again."
            )
            cannot_commit(self._context, transaction, error)
        self._go_back()

    # InboxConsumer

    def _schema_of(self, received: RawMessage[SegmentConsumer]) -> Schema[T]:
        return self._schema

    async def _next(self) -> Message[T]:
        while True:
            with suppress(_MessageRedelivered):
                return await super()._next()

    def _hand_out(self, received: RawMessage[SegmentConsumer]) -> Message[T]:
        segment_id = received.segment.segment.segment_id
        entry = received.entry_id
        if self._ordered_inbox.is_stale:
            raise _MessageRedelivered
        if isinstance(received.segment, SharedSegment):
            entry = SharedEntryId(*entry)
        else:
            self._acks.record_delivery(segment_id, entry)
        self._vector = MappingProxyType({**self._vector, segment_id: entry})
        return Message(received, self._schema, self.topic, segment_id, self._vector)

    # Reader of HeldSegments

    async def segment_consumer(self, segment: AssignedSegment) -> SegmentConsumer:
        """Make a new consumer of a segment."""
        how = self._settings.of_segment(
            self._subscription,
            self.name,
            segment.segment_id,
            self._given_schema.info,
            segment.bucket_ranges,
        )
        how = replace(how, incarnation=self._incarnation)
        self._acks.start_attachment(segment.segment_id)
        self._lost.discard(segment.segment_id)
        if segment.bucket_ranges:
            log = self._logs.setdefault(segment.segment_id, DeliveryLog())
            return SharedSegment(self._context, segment, how, self._inbox, self, log)
        return OrderedSegment(self._context, segment, how, self._inbox, self)

    def missing(self, segment: AssignedSegment, times: int) -> bool:
        """Retry, and after a few tries ask the controller again: it knows whether it was pruned."""
        if times >= MISSING_SEGMENT_TRIES:
            self._session.again(
                ServiceNotReady(f"{segment.topic} does not exist; the controller is asked again.")
            )
        return True

    async def part_with(self, consumer: SegmentConsumer) -> None:
        """Leave the segment in order, at most for `hand_over_timeout_s`."""
        try:
            async with asyncio.timeout(self._settings.hand_over_timeout_s):
                await consumer.leave_in_order()
        except TimeoutError:
            return

    def parted(self, segment: AssignedSegment) -> None:
        """Give up a segment that was closed."""
        segment_id = segment.segment_id
        log = self._logs.get(segment_id)
        if segment.bucket_ranges:
            is_left = log is not None and not log.is_empty
        else:
            is_left = self._acks.lose_segment(segment_id)
        if log is not None and log.is_empty:
            del self._logs[segment_id]
        if is_left:
            self._lost.add(segment_id)
        else:
            self._vector = _without(self._vector, {segment_id})
        self._acks.forget_left_segments(self._held.ids)

    def _forget_lost(self, acknowledged: Container[int]) -> None:
        """Remove lost segments from the vector that are all acknowledged, or in `acknowledged`."""
        done = {i for i in self._lost if i in acknowledged or not self._has_unacknowledged(i)}
        if done:
            self._lost -= done
            self._vector = _without(self._vector, done)
        for segment_id in done:
            self._logs.pop(segment_id, None)

    def failed(self, error: MagnetarError) -> None:
        """Fail, as a segment or the session has failed."""
        self._failure = self._failure or error
        self._inbox.fail(error)

    # Assignments

    def _assigned(self, assignment: Assignment) -> None:
        self._held.assign(assignment.segments)


def _without(positions: Positions, gone: Container[int]) -> Positions:
    kept: Mapping[int, EntryId] = {i: entry for i, entry in positions.items() if i not in gone}
    return MappingProxyType(kept)
