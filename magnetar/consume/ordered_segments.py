"""The segments of an ordered consumer: their assignment, their consumers, their one inbox."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Final, Protocol

from magnetar.bounds import LEAVE_S
from magnetar.consume.assignments import (
    AssignedSegment,
    Assignment,
    Effect,
    Holdings,
    LeaveSegment,
    OpenSegment,
    assignment_of,
)
from magnetar.consume.message import RawMessage
from magnetar.consume.receiving import Inbox
from magnetar.consume.segment_consumer import SegmentConsumer, SubscribedSegment
from magnetar.consume.settings import SubscribeSettings
from magnetar.context import ClientContext
from magnetar.errors import (
    BrokerError,
    ConsumerAssignFailed,
    ConsumerBusy,
    MagnetarError,
    NotSupported,
    OperationTimedOut,
    TopicNotFound,
)
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.message_id import EntryId
from magnetar.opening import completed
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.refusals import Refusals
from magnetar.wire.attachment import Attachment, is_retriable
from magnetar.wire.connection import Connection, PeerKind

__all__ = [
    "ControllerSession",
    "HeldSegments",
    "OrderedInbox",
    "OrderedReader",
    "OrderedSegment",
    "SegmentReader",
    "can_be_told_to_leave",
]


_M1: Final = "Pulsar Server5.0.0-M1"


def can_be_told_to_leave(server_version: str) -> bool:
    """Whether a broker knows SCALABLE_TOPIC_UNSUBSCRIBE: all but 5.0.0-M1 do."""
    rest = server_version.removeprefix(_M1)
    return rest == server_version or rest[:1].isdigit()


class ControllerSession(Attachment):
    """The registration of an ordered consumer with the controller of its topic.

    - Each attempt asks anew who the controller is (a layout, looked at once), and subscribes there
      under the same consumer name: the controller gives back what the consumer had.
    - An assignment is complete. They count in the order in which they arrive, whether as the answer
      or unasked; one of an older layout than the last is ignored. A new registration begins anew
      with that, since the topic may have been made anew.
    - While the session is lost the consumer keeps what it has, as the controller does for it.
    - `close` says so to the controller, which then deals at once. 5.0.0-M1 does not know how to be
      told, and would end the connection: it is told nothing.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        consumer_name: str,
        kind: pb.ScalableConsumerType = pb.STREAM,
        *,
        create_if_missing: bool = True,
    ) -> None:
        """Register for `topic`, as the user named it.  Raises `InvalidTopicName`."""
        super().__init__(context)
        self._asked: Final = topic
        self._subscription: Final = subscription
        self._consumer_name: Final = consumer_name
        self._kind: Final = kind
        self._consumer_id: Final = context.ids.consumer_id()
        self._create_if_missing: Final = create_if_missing
        self._topic = topic
        self._first_layout: Layout | None = None
        self._epoch = -1
        self._refusals = Refusals()
        self._assigned: Callable[[Assignment], None] | None = None
        self._told: Callable[[MagnetarError], None] | None = None

    @property
    def topic(self) -> str:
        """The topic as the broker resolved its name: `topic://...`."""
        return self._topic

    @property
    def first_layout(self) -> Layout | None:
        """The layout before the first assignment."""
        return self._first_layout

    def on_assignment(self, listener: Callable[[Assignment], None]) -> None:
        """Tell this listener, the only one, of every assignment; called before `open`."""
        self._assigned = listener

    def on_failure(self, listener: Callable[[MagnetarError], None]) -> None:
        """Tell this listener, the only one, why the session has ended by itself, should it."""
        self._told = listener

    # Attachment

    def describe(self) -> str:
        """Name the session for error messages."""
        return f"Consumer {self._consumer_name} of {self._subscription} on {self._asked}"

    async def find(self) -> Connection:
        """The broker that leads the topic."""
        may_create = self._create_if_missing and not self._refusals.granted_before
        watch = LayoutWatch(self.context, self._asked, create_if_missing=may_create)
        try:
            await watch.open(self.context.settings.operation_timeout_s)
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            await watch.close()
        self._topic = watch.topic
        if self._first_layout is None:
            self._first_layout = watch.layout
        pool = self.context.pool
        if watch.controller_url is None:
            return await pool.of_topic(self._topic)
        return await pool.at(watch.controller_url)

    async def attach(self, connection: Connection) -> None:
        """Register, until the controller answers."""
        timeout_s = self.context.settings.operation_timeout_s
        self._epoch = -1
        answer: asyncio.Future[None] = self.context.loop.create_future()

        def answered(outcome: pb.BaseCommand | MagnetarError) -> None:
            # Not later: an assignment that comes behind the answer counts more.
            if answer.done():
                return
            if isinstance(outcome, MagnetarError):
                answer.set_exception(outcome)
            else:
                self._take(outcome.scalable_topic_subscribe_response.assignment)
                answer.set_result(None)

        connection.attach(PeerKind.CONSUMER, self._consumer_id, self)
        request_id = connection.ask(self._subscribe(), answered)
        try:
            async with asyncio.timeout(timeout_s):
                await answer
        except TimeoutError:
            raise OperationTimedOut(
                f"The controller of {self._topic} has not answered within {timeout_s:g} s; look "
                "whether its broker is overloaded, or allow more by operation_timeout_s."
            ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            connection.forget(request_id)
        self._refusals.granted()

    async def leave(self, connection: Connection) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE, where that is known."""
        if can_be_told_to_leave(connection.server_version):
            leaving = pb.CommandScalableTopicUnsubscribe(
                request_id=0, consumer_id=self._consumer_id
            )
            await connection.request(
                pb.BaseCommand(
                    type=pb.BaseCommand.SCALABLE_TOPIC_UNSUBSCRIBE,
                    scalable_topic_unsubscribe=leaving,
                ),
                LEAVE_S,
            )

    def failed(self, error: MagnetarError) -> None:
        """The session has ended by itself."""
        if self._told is not None:
            self._told(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """An assignment that nobody asked for."""
        if frame.command.type == pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE:
            self._take(frame.command.scalable_topic_assignment_update.assignment)

    def _take(self, told: pb.ScalableConsumerAssignment) -> None:
        try:
            assignment = assignment_of(told)
        except NotSupported as error:
            self.again(error)
            return
        if assignment.layout_epoch < self._epoch:
            return
        self._epoch = assignment.layout_epoch
        if self._assigned is not None:
            self._assigned(assignment)

    def _subscribe(self) -> pb.BaseCommand:
        return pb.BaseCommand(
            type=pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE,
            scalable_topic_subscribe=pb.CommandScalableTopicSubscribe(
                request_id=0,
                topic=self._topic,
                subscription=self._subscription,
                consumer_name=self._consumer_name,
                consumer_id=self._consumer_id,
                consumer_type=self._kind,
            ),
        )


class SegmentReader(Protocol):
    """The consumer that reads the segments of `HeldSegments`."""

    async def segment_consumer(self, segment: AssignedSegment) -> SegmentConsumer:
        """A new consumer of the segment, not opened.  Raises why there is none."""

    def missing(self, segment: AssignedSegment, times: int) -> bool:
        """The broker knows no such segment, so many times in a row; whether to go on asking."""

    async def part_with(self, consumer: SegmentConsumer) -> None:
        """Return when an open segment that was taken away can be closed."""

    def parted(self, segment: AssignedSegment) -> None:
        """The segment is closed."""

    def failed(self, error: MagnetarError) -> None:
        """A segment cannot be read, for good."""


class _HeldSegment:
    """One segment: from its assignment until it is closed."""

    __slots__ = ("backoff", "consumer", "missing", "opened", "segment", "settled", "task")

    def __init__(self, segment: AssignedSegment, context: ClientContext) -> None:
        self.segment = segment
        self.backoff = context.backoff()
        self.consumer: SegmentConsumer | None = None
        self.opened = False
        self.missing = 0
        self.settled: asyncio.Future[None] = context.loop.create_future()
        """Resolved when it is open for the first time, or will not be."""
        self.task: asyncio.Task[None] | None = None

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


class HeldSegments:
    """The segment consumers of an ordered consumer, as its assignments want them.

    - Each assigned segment has one segment consumer, opened at once and for as long as it takes:
      another consumer may still be leaving it (`ConsumerBusy`, `ConsumerAssignFailed`).
    - What becomes of a segment that is not there is its reader's to say (`SegmentReader.missing`).
    - Any other refusal for good fails the whole consumer, as it would silently lack a segment.
    - A segment that is taken away is parted with as its reader does it, and then closed; one that
      was not open yet is closed at once.
    """

    def __init__(self, context: ClientContext, reader: SegmentReader) -> None:
        self._context = context
        self._reader = reader
        self._holdings = Holdings()
        self._held: dict[int, _HeldSegment] = {}
        self._closed = False
        self._failure: MagnetarError | None = None

    def consumer_of(self, segment_id: int) -> SegmentConsumer | None:
        """The consumer of a segment, open or not, until the segment is closed."""
        held = self._held.get(segment_id)
        return None if held is None else held.consumer

    @property
    def consumers(self) -> list[SegmentConsumer]:
        """The consumers of all segments that are not closed."""
        return [held.consumer for held in self._held.values() if held.consumer is not None]

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the segments that are assigned."""
        return self._holdings.held

    def assign(self, segments: Iterable[AssignedSegment]) -> None:
        """Take in a complete assignment."""
        if not self._closed:
            self._do(self._holdings.assign(segments))

    async def settled(self) -> None:
        """Return when all that is assigned is open.  Raises why something cannot be."""
        while self._failure is None:
            waiting = [
                held.settled
                for segment_id in self.ids
                if not (held := self._held[segment_id]).settled.done()
            ]
            if not waiting:
                return
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        raise self._failure

    async def close(self) -> None:
        """Close everything at once; bounded in time.  Cancelling it does not stop that."""
        self._closed = True
        held, self._held = list(self._held.values()), {}
        if held:
            await completed(_all(self._close(each) for each in held))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenSegment(segment):
                    held = self._held[segment.segment_id] = _HeldSegment(segment, self._context)
                    held.task = self._context.loop.create_task(self._open(held, pause=False))
                case LeaveSegment(segment):
                    held = self._held[segment.segment_id]
                    opening, held.task = held.task, None
                    held.task = self._context.loop.create_task(self._leave(held, opening))

    async def _open(self, held: _HeldSegment, *, pause: bool) -> None:
        while True:
            if pause:
                await asyncio.sleep(held.backoff.pause_s())
            pause = True
            if held.consumer is not None:
                await held.consumer.close()
            try:
                consumer = await self._reader.segment_consumer(held.segment)
                consumer.on_failure = self._lost_for_good
                held.consumer = consumer
                await consumer.open(None)
            except MagnetarError as error:
                if self._goes_on(held, error):
                    continue
            else:
                held.opened = True
                held.missing = 0
                held.backoff.reset()
            held.settle()
            return

    def _goes_on(self, held: _HeldSegment, error: MagnetarError) -> bool:
        """Whether to try again what was refused for good."""
        if is_retriable(error) or isinstance(error, ConsumerBusy | ConsumerAssignFailed):
            return True
        if isinstance(error, TopicNotFound):
            held.missing += 1
            return self._reader.missing(held.segment, held.missing)
        self._failure = self._failure or error
        self._reader.failed(error)
        return False

    def _lost_for_good(self, consumer: SegmentConsumer) -> None:
        """A segment consumer has failed; those that are being opened say so themselves."""
        held = self._held.get(consumer.segment.segment_id)
        if held is None or held.consumer is not consumer or not held.opened:
            return
        if held.segment.segment_id not in self._holdings.held:
            return
        held.opened = False
        if self._goes_on(held, consumer.error or TopicNotFound("The segment is gone.")):
            held.task = self._context.loop.create_task(self._open(held, pause=True))

    async def _leave(self, held: _HeldSegment, opening: asyncio.Task[None] | None) -> None:
        await _ended(opening)
        consumer = held.consumer
        if consumer is not None:
            if held.opened:
                await self._reader.part_with(consumer)
            await consumer.close()
        held.settle()
        if self._held.get(held.segment.segment_id) is held and not self._closed:
            del self._held[held.segment.segment_id]
            self._reader.parted(held.segment)
            self._do(self._holdings.closed(held.segment))

    async def _close(self, held: _HeldSegment) -> None:
        await _ended(held.task)
        held.settle()
        if held.consumer is not None:
            await held.consumer.close()


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,))


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    await asyncio.gather(*work)


class OrderedReader(Protocol):
    """The consumer that reads ordered segments, with what is known of its acknowledgements."""

    times_back: int
    """How often everything has come again."""

    @property
    def in_doubt(self) -> bool:
        """Whether it is to be seen what comes again."""

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an entry was acknowledged after it was sent."""

    def start_attachment(self, segment_id: int) -> None:
        """A new attachment: what is not acknowledged comes again."""

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """The first message has come since a new attachment, or since all was asked for again."""

    def restart_from_earlier(self, segment_id: int) -> None:
        """The broker has begun again at an earlier message."""


class OrderedSegment(SegmentConsumer):
    """One segment of a stream consumer.

    - What was acknowledged up to, plainly or in a transaction that committed, is not handed out any
      more, although it came before that was known (after a reconnect).
    - A broker that sends earlier messages again by itself has let go of what a transaction held:
      what was handed out comes again (`OrderedReader.restart_from_earlier`).
    - It is left in order only when no transaction that acknowledged on it is open: what such a one
      leaves undone must come before what follows it.
    - While it is not known what becomes of a transaction nothing is handed out.
    """

    def __init__(
        self,
        context: ClientContext,
        segment: SubscribedSegment,
        settings: SubscribeSettings,
        inbox: Inbox[SegmentConsumer],
        reader: OrderedReader,
    ) -> None:
        super().__init__(context, segment, settings, inbox)
        self._reader = reader
        self._furthest: tuple[tuple[int, int], int] | None = None
        """Entry and index of the last message that has come."""
        self._transactions: set[tuple[int, int]] = set()
        self._no_transactions = asyncio.Event()
        self._no_transactions.set()

    # What comes

    def goes_back(self, messages: Sequence[RawMessage[SegmentConsumer]]) -> bool:
        """Whether these come again, unasked; else they are the last that have come."""
        first, last = messages[0], messages[-1]
        before = self._furthest
        if before is None:
            self._reader.record_first_arrival(self.segment.segment_id, first.entry_id)
        if before is not None and (first.entry.key, first.batch_index) <= before:
            self._permits.taken(len(messages))
            self._reader.restart_from_earlier(self.segment.segment_id)
            return True
        self._furthest = last.entry.key, last.batch_index
        return False

    def skipped(self, received: RawMessage[object]) -> None:
        """Take note that the message that was just taken is not handed out."""
        if self._handed_out is not None:
            self._handed_out.take_back(received)

    def redeliver_all(self) -> None:
        """Ask for everything that is not acknowledged once more, unless it is being left."""
        if self._handed_out is not None:
            self._handed_out.give_up()
        if not self._leaving:
            self._furthest = None
            self._tracker.forget_all()
            self._redeliver_all()

    def detached(self, error: MagnetarError) -> None:
        """Tell the reader that what is not acknowledged comes again."""
        super().detached(error)
        self._furthest = None
        self._reader.start_attachment(self.segment.segment_id)

    # Transactions

    @property
    def unanswered(self) -> Collection[asyncio.Task[object]]:
        """Acknowledgements in transactions that the broker has not answered."""
        return self._answering.running

    def joined(self, transaction: tuple[int, int]) -> None:
        """Take note of a transaction that acknowledges here."""
        self._transactions.add(transaction)
        self._no_transactions.clear()

    def over(self, transaction: tuple[int, int], committed: EntryId | None) -> None:
        """Forget a transaction that is over; it has committed up to `committed`."""
        if committed is not None:
            self._chunks.passed(committed.key)
            # What waits behind the first piece of an incomplete message is still to be sent.
            self._tracker.commit_up_to(self.before_open(committed))
        self._transactions.discard(transaction)
        if not self._transactions:
            self._no_transactions.set()

    # The end

    async def leave_in_order(self) -> None:
        """Leave as the class says: no transaction that acknowledged here may be open."""
        self._leaving = True
        self._inbox.drop(self)
        while self._handed_out or self._transactions:
            if self._handed_out:
                await self._handed_out.all_acknowledged()
            await self._no_transactions.wait()
        await self.close()

    async def close(self) -> None:
        """Close without waiting for transactions."""
        self._transactions.clear()
        self._no_transactions.set()
        await super().close()

    def failed(self, error: MagnetarError) -> None:
        """Stop waiting for transactions; the segment cannot be read any more."""
        self._transactions.clear()
        self._no_transactions.set()
        super().failed(error)


class OrderedInbox(Inbox[SegmentConsumer]):
    """The one inbox of all segments of a stream consumer.  See `OrderedSegment`."""

    def __init__(self, max_messages: int, max_bytes: int, reader: OrderedReader) -> None:
        super().__init__(max_messages, max_bytes)
        self._reader = reader
        self._taken_at = 0

    @property
    def is_stale(self) -> bool:
        """Whether everything comes again since the last message was taken."""
        return self._taken_at != self._reader.times_back

    def put_back(self, received: RawMessage[SegmentConsumer]) -> None:
        """Put back what could not be handed out, unless it comes again."""
        if not self.is_stale:
            super().put_back(received)

    def put(
        self, segment: SegmentConsumer, messages: Sequence[RawMessage[SegmentConsumer]]
    ) -> None:
        """Put in messages of one entry of a segment, unless they show that it went back."""
        if not (isinstance(segment, OrderedSegment) and segment.goes_back(messages)):
            super().put(segment, messages)

    def take_nowait(self) -> RawMessage[SegmentConsumer] | None:
        """The next message, if one is there and is to be handed out."""
        if self._reader.in_doubt:
            return None
        self._taken_at = self._reader.times_back
        while (received := super().take_nowait()) is not None:
            segment = received.segment
            if not self._reader.is_settled(segment.segment.segment_id, received.entry_id):
                return received
            if isinstance(segment, OrderedSegment):
                segment.skipped(received)
        return None
