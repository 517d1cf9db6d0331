"""`StreamConsumer[T]`: one of those that share the segments of a topic, each read in order."""

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
    """The message that was taken is not handed out, as everything comes again."""


class StreamConsumer(InboxConsumer[T, SegmentConsumer]):
    """A consumer of a share of the segments of a topic, each in order.  Made by
    `Client.stream_consumer`.

    - Each message carries the position vector of when it was handed out: of each segment the last
      message handed out by then. Acknowledging it acknowledges every entry of the vector.
    - A segment that goes to another consumer is left in order: nothing more of it is handed out,
      and it is closed when the application has acknowledged what it was given (at the latest after
      `hand_over_timeout_s`; what is not acknowledged by then comes again to the other one).
    - A child's messages come after its parents': the controller gives a child to somebody only when
      its parents are read and acknowledged, and the inbox hands out in order of arrival.
    - A segment that was lost before everything handed out of it was acknowledged stays in the
      vector. In a transaction its entry raises, so that the transaction cannot commit what another
      consumer will do again; without one it is passed over, and in vectors no longer.
    - Where something was read on after a reconnect, or after the segment came back, though what had
      been handed out before was not acknowledged, a transaction is refused too (`OrderedAcks`).
    - When a transaction with an acknowledgement of this consumer does not commit, everything that
      was handed out and is not acknowledged is handed out once more, in order; until it is known
      that the broker has let go of it, and every acknowledgement in it is answered, nothing is
      handed out. Messages from before are not acknowledged any more: that raises
      `TransactionConflict`. Who gives up a message before acknowledging it in the transaction asks
      for that itself (`redeliver_unacknowledged`).
    - Only one transaction at a time acknowledges on a segment; another one raises too.
    - A topic that is gone fails the consumer after a while.
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
        """The name by which the controller knows it."""
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
        self.times_back = 0
        """How often everything has come again; messages from before are not acknowledged."""
        self.on_going_back: Callable[[], None] | None = None
        """Called when everything comes again, other than by `redeliver_unacknowledged`."""
        self._failure: MagnetarError | None = None

    @property
    def topic(self) -> str:
        """The topic as the broker resolved its name: `topic://...`."""
        return self._session.topic

    @property
    def segment_ids(self) -> frozenset[int]:
        """The segments that it has been given."""
        return self._held.ids

    @property
    def positions(self) -> Positions:
        """The last message of each segment that was handed out, or is acknowledged."""
        return self._vector

    @property
    def failure(self) -> MagnetarError | None:
        """Why it has ended by itself."""
        return self._failure

    @property
    def is_all_acknowledged(self) -> bool:
        """Whether everything that was handed out is acknowledged."""
        return all(self._acks.is_all_acknowledged(segment_id) for segment_id in self._vector)

    def is_acknowledged(self, positions: Positions) -> bool:
        """Whether everything up to there is, outside of transactions that are open."""
        return all(self._acks.is_acknowledged(i, entry, None) for i, entry in positions.items())

    async def open(self) -> None:
        """Register, and subscribe to what is assigned first.

        Raises what the broker refuses, `OperationTimedOut`.
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
                f"Consumer {self.name} of {self.topic} got not all of its segments within "
                f"{timeout_s:g} s; look whether another consumer holds on to one, or allow more "
                "by operation_timeout_s."
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

        Acts when it is called, awaited or not.  A plain one is sent within `ack_grouping_ms`; with
        `wait` the broker's word is awaited, in a transaction always.  Raises `AlreadyClosed`, and
        where the broker's word is awaited what it refuses it with.
        """
        check_message(message, self.topic)
        if not message.id.positions:
            raise InvalidArgument(
                f"Message {message.id} was not received in order; give it to the consumer that "
                "gave it."
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
                f"Consumer {self.name} is closed; the message comes again to whoever subscribes."
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
        """Return the consumer that acknowledges an entry, if one has to.  Raises a refusal."""
        if entry.batch_index >= 0 and not entry.batch_size:
            raise InvalidArgument(
                f"Id {entry} does not tell the size of its batch; give the id of a message that "
                "was received."
            )
        id_of_it = None if transaction is None else transaction.id
        if self._acks.is_acknowledged(segment_id, entry, id_of_it):
            return None
        if self._acks.awaits_redelivery(segment_id, entry):
            raise TransactionConflict(
                f"Message {entry} of segment {segment_id} comes again, as a transaction did not "
                "commit; acknowledge it when it is received once more."
            )
        if id_of_it is not None and (holder := self._acks.holder(segment_id, id_of_it)) is not None:
            raise TransactionConflict(
                f"Transaction {TxnId(*holder)} acknowledges on segment {segment_id} of "
                f"{self.topic} and has not ended; end it before another one acknowledges there."
            )
        consumer = self._held.consumer_of(segment_id)
        if consumer is not None and consumer.state is AttachmentState.CLOSED:
            consumer = None
        if consumer is None and transaction is not None:
            raise AlreadyClosed(
                f"Segment {segment_id} of {self.topic} went to another consumer before this was "
                "acknowledged; abort the transaction, as it is delivered there again."
            )
        if transaction is not None and self._acks.may_be_duplicated(segment_id):
            raise TransactionConflict(
                f"Messages of segment {segment_id} of {self.topic} come again, as the connection "
                "or the segment was lost before they were acknowledged; abort the transaction, "
                "which may do them twice."
            )
        return consumer

    # Transactions

    def follow(self, transaction: AckTransaction) -> None:
        """Watch a transaction: if it does not commit, what is not acknowledged comes again."""
        if isinstance(transaction, ObservedTransaction) and self._acks.join_transaction(
            transaction
        ):
            transaction.when_over(partial(self._over, transaction.id))

    def _over(self, transaction: tuple[int, int], committed: bool) -> None:
        unanswered = () if committed else [t for s in self._segments() for t in s.unanswered]
        if unanswered and self._closing is None:
            # The broker may hold what one of them names until it has refused it.
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
        """Hand out once more, in order, everything that is not acknowledged.

        Messages from before can not be acknowledged any more.
        """
        check_loop(self._loop)
        self.times_back += 1
        self._acks.expect_redelivery()
        kept = (i for i in self._vector if self._held.consumer_of(i) is not None)
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
        """See `OrderedAcks`."""
        return self._acks.in_doubt

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """See `OrderedAcks`."""
        return self._acks.is_settled(segment_id, entry)

    def start_attachment(self, segment_id: int) -> None:
        """See `OrderedAcks`."""
        self._acks.start_attachment(segment_id)

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """See `OrderedAcks`."""
        self._acks.record_first_arrival(segment_id, entry)

    def restart_from_earlier(self, segment_id: int) -> None:
        """A transaction that held earlier messages is over: everything again, from the first."""
        if self.in_doubt or self._closing is not None:
            return  # it is asked for when that is over
        for transaction in self._acks.transactions_on(segment_id):
            error = TransactionFailed(
                f"Segment {segment_id} of {self.topic} begins again at an earlier message, as "
                "another transaction did not commit; begin another one with what comes again."
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
        self._acks.record_delivery(segment_id, entry)
        self._vector = MappingProxyType({**self._vector, segment_id: entry})
        return Message(received, self._schema, self.topic, segment_id, self._vector)

    # Reader of HeldSegments

    async def segment_consumer(self, segment: AssignedSegment) -> SegmentConsumer:
        """A new consumer of a segment."""
        how = self._settings.of_segment(
            self._subscription, self.name, segment.segment_id, self._given_schema.info
        )
        how = replace(how, incarnation=self._incarnation)
        self._acks.start_attachment(segment.segment_id)
        self._lost.discard(segment.segment_id)
        return OrderedSegment(self._context, segment, how, self._inbox, self)

    def missing(self, segment: AssignedSegment, times: int) -> bool:
        """The segment was pruned, or the topic deleted: if it stays so, the controller knows."""
        if times >= MISSING_SEGMENT_TRIES:
            self._session.again(
                ServiceNotReady(f"{segment.topic} is not there; the controller is asked again.")
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
        """A segment is no longer this consumer's."""
        segment_id = segment.segment_id
        if self._acks.lose_segment(segment_id):
            self._lost.add(segment_id)
        else:
            self._vector = _without(self._vector, {segment_id})
        self._acks.forget_left_segments(self._held.ids)

    def _forget_lost(self, acknowledged: Container[int]) -> None:
        """Take lost segments out of the vector that are acknowledged, or that the caller named."""
        done = {i for i in self._lost if i in acknowledged or self._acks.is_all_acknowledged(i)}
        if done:
            self._lost -= done
            self._vector = _without(self._vector, done)

    def failed(self, error: MagnetarError) -> None:
        """End, as a segment or the session cannot be had."""
        self._failure = self._failure or error
        self._inbox.fail(error)

    # Assignments

    def _assigned(self, assignment: Assignment) -> None:
        self._held.assign(assignment.segments)


def _without(positions: Positions, gone: Container[int]) -> Positions:
    kept: Mapping[int, EntryId] = {i: entry for i, entry in positions.items() if i not in gone}
    return MappingProxyType(kept)
