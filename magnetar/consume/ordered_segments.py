"""The segments of an ordered consumer: their assignment, their consumers and their inbox."""

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
    "supports_unsubscribe",
]


_M1: Final = "Pulsar Server5.0.0-M1"


def supports_unsubscribe(server_version: str) -> bool:
    """Whether a broker knows SCALABLE_TOPIC_UNSUBSCRIBE: all but 5.0.0-M1 do."""
    rest = server_version.removeprefix(_M1)
    return rest == server_version or rest[:1].isdigit()


class ControllerSession(Attachment):
    """The registration of an ordered consumer with the controller of its topic.

    Each attempt to attach looks up the controller, and subscribes there under the same consumer
    name; the controller then gives the same segments again.  Assignments take effect in the order
    in which they arrive; one of an older layout than the last is ignored.  While the session is
    lost the consumer keeps its segments.
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
        """`topic` is the name as the user gave it.  Raises `InvalidTopicName`."""
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
        self._failure_listener: Callable[[MagnetarError], None] | None = None

    @property
    def topic(self) -> str:
        """The topic's name, as the broker resolved it: `topic://...`."""
        return self._topic

    @property
    def first_layout(self) -> Layout | None:
        """The layout before the first assignment."""
        return self._first_layout

    def on_assignment(self, listener: Callable[[Assignment], None]) -> None:
        """Set the listener that is called with every assignment; before `open`."""
        self._assigned = listener

    def on_failure(self, listener: Callable[[MagnetarError], None]) -> None:
        """Set the listener that is called with the error if the session fails."""
        self._failure_listener = listener

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"Consumer {self._consumer_name} of {self._subscription} on {self._asked}"

    async def find(self) -> Connection:
        """A connection to the broker that has the controller of the topic."""
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
        """Register, and wait for the controller's answer.  Raises `OperationTimedOut`."""
        timeout_s = self.context.settings.operation_timeout_s
        self._epoch = -1  # The topic may have been created again, with lower epochs.
        answer: asyncio.Future[None] = self.context.loop.create_future()

        def answered(outcome: pb.BaseCommand | MagnetarError) -> None:
            # At once: an assignment that comes after the answer must replace that of the answer.
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
                f"The controller of {self._topic} did not answer within {timeout_s:g} s; check "
                "whether its broker is overloaded, or raise operation_timeout_s."
            ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            connection.forget(request_id)
        self._refusals.granted()

    async def leave(self, connection: Connection) -> None:
        """Send SCALABLE_TOPIC_UNSUBSCRIBE, so that the controller assigns the segments at once."""
        # 5.0.0-M1 does not know the command, and would close the connection.
        if supports_unsubscribe(connection.server_version):
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
        """Report the error of the session."""
        if self._failure_listener is not None:
            self._failure_listener(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """Take an unasked assignment."""
        if frame.command.type == pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE:
            self._take(frame.command.scalable_topic_assignment_update.assignment)

    def _take(self, message: pb.ScalableConsumerAssignment) -> None:
        assignment = assignment_of(message)
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
        """A new consumer of the segment, not open.  Raises an error if it cannot make one."""

    def missing(self, segment: AssignedSegment, times: int) -> bool:
        """Called when the broker did not know the segment `times` in a row; whether to retry."""

    async def part_with(self, consumer: SegmentConsumer) -> None:
        """Wait until an open segment that was taken away can be closed."""

    def parted(self, segment: AssignedSegment) -> None:
        """Called when the segment is closed."""

    def failed(self, error: MagnetarError) -> None:
        """Called when a segment cannot be read, for good."""


class _HeldSegment:
    """One segment, from its assignment until it is closed."""

    __slots__ = ("backoff", "consumer", "gone", "missing", "opened", "segment", "settled", "task")

    def __init__(self, segment: AssignedSegment, context: ClientContext) -> None:
        self.segment = segment
        self.backoff = context.backoff()
        self.consumer: SegmentConsumer | None = None
        self.opened = False
        self.missing = 0
        self.gone = False
        """Whether it is not opened any more, as its broker does not know it."""
        self.settled: asyncio.Future[None] = context.loop.create_future()
        """Resolved when it is open for the first time, or will not be."""
        self.task: asyncio.Task[None] | None = None

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


class HeldSegments:
    """The segment consumers of an ordered consumer, one for each assigned segment.

    Each is opened at once, and retried while another consumer is still leaving the segment
    (`ConsumerBusy`, `ConsumerAssignFailed`).  The reader decides on a segment that does not exist
    (`SegmentReader.missing`).  Any other error that is not retriable fails the whole consumer, as
    it would silently miss a segment.  A segment that is taken away is closed when the reader allows
    it (`SegmentReader.part_with`).
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
        """The ids of the assigned segments."""
        return self._holdings.held

    def assign(self, segments: Iterable[AssignedSegment]) -> None:
        """Take a complete assignment."""
        if self._closed:
            return
        self._do(self._holdings.assign(segments))
        for segment_id in self._holdings.held:
            held = self._held[segment_id]
            if held.gone:
                # Its topic was deleted and created again, or its broker has learned of it.
                held.gone, held.missing = False, 0
                held.task = self._context.loop.create_task(self._open(held, pause=True))

    async def settled(self) -> None:
        """Wait until all assigned segments are open.  Raises the error if one cannot be opened."""
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
                consumer.on_failure = self._on_failure
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
        """Whether to open the segment again after an error."""
        if is_retriable(error) or isinstance(error, ConsumerBusy | ConsumerAssignFailed):
            return True
        if isinstance(error, TopicNotFound):
            held.missing += 1
            held.gone = not self._reader.missing(held.segment, held.missing)
            return not held.gone
        self._failure = self._failure or error
        self._reader.failed(error)
        return False

    def _on_failure(self, consumer: SegmentConsumer) -> None:
        """Open a failed segment again, or fail; the error of an opening is raised there."""
        held = self._held.get(consumer.segment.segment_id)
        if held is None or held.consumer is not consumer or not held.opened:
            return
        if held.segment.segment_id not in self._holdings.held:
            return
        held.opened = False
        if self._goes_on(held, consumer.error or TopicNotFound("The segment is gone.")):
            held.task = self._context.loop.create_task(self._open(held, pause=True))

    async def _leave(self, held: _HeldSegment, opening: asyncio.Task[None] | None) -> None:
        await _cancel(opening)
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
        await _cancel(held.task)
        held.settle()
        if held.consumer is not None:
            await held.consumer.close()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,))


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    await asyncio.gather(*work)


class OrderedReader(Protocol):
    """The consumer that reads ordered segments, and knows its acknowledgements."""

    times_back: int
    """The number of redeliveries of everything."""

    @property
    def in_doubt(self) -> bool:
        """Whether a transaction will not commit and what it redelivers is not known yet."""

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an entry was acknowledged after it was sent."""

    def start_attachment(self, segment_id: int) -> None:
        """Called at a new attachment: unacknowledged messages come again."""

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """Called with the first message since a new attachment, or a redelivery of everything."""

    def restart_from_earlier(self, segment_id: int) -> None:
        """Called when the broker has begun again at an earlier message."""


class OrderedSegment(SegmentConsumer):
    """One segment of a stream consumer.

    Messages up to the acknowledged position are not handed out again, also if they came before that
    position was known (after a reconnect).  While a transaction will not commit and is not over, no
    message is handed out.
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
        """The entry and index of the last message that came."""
        self._transactions: set[tuple[int, int]] = set()
        self._no_transactions = asyncio.Event()
        self._no_transactions.set()

    # Deliveries

    def goes_back(self, messages: Sequence[RawMessage[SegmentConsumer]]) -> bool:
        """Note messages that came; returns whether they come again, unasked."""
        first, last = messages[0], messages[-1]
        before = self._furthest
        if before is None:
            self._reader.record_first_arrival(self.segment.segment_id, first.entry_id)
        if before is not None and (first.entry.key, first.batch_index) <= before:
            # The broker has released messages that a transaction held.
            self._permits.taken(len(messages))
            self._reader.restart_from_earlier(self.segment.segment_id)
            return True
        self._furthest = last.entry.key, last.batch_index
        return False

    def skipped(self, received: RawMessage[object]) -> None:
        """Note that the message that was just taken is not handed out."""
        if self._handed_out is not None:
            self._handed_out.take_back(received)

    def redeliver_all(self) -> None:
        """Request everything that is not acknowledged again, unless the segment is being left."""
        if self._handed_out is not None:
            self._handed_out.give_up()
        if not self._leaving:
            self._furthest = None
            self._tracker.forget_all()
            self._redeliver_all()

    def detached(self, error: MagnetarError) -> None:
        """Tell the reader that unacknowledged messages come again."""
        super().detached(error)
        self._furthest = None
        self._reader.start_attachment(self.segment.segment_id)

    # Transactions

    @property
    def unanswered(self) -> Collection[asyncio.Task[object]]:
        """The acknowledgements in transactions that the broker has not answered."""
        return self._answering.running

    def joined(self, transaction: tuple[int, int]) -> None:
        """Note a transaction that acknowledges here."""
        self._transactions.add(transaction)
        self._no_transactions.clear()

    def over(self, transaction: tuple[int, int], committed: EntryId | None) -> None:
        """Forget a transaction that is over; it has committed up to `committed`."""
        if committed is not None:
            self._chunks.pass_up_to(committed.key)
            # Acknowledgements after the first chunk of an incomplete message have yet to be sent.
            self._tracker.commit_up_to(self.before_open(committed))
        self._transactions.discard(transaction)
        if not self._transactions:
            self._no_transactions.set()

    # The end

    async def leave_in_order(self) -> None:
        """Leave when all messages handed out are acknowledged and no transaction is open here.

        Messages that a transaction leaves unacknowledged must come before those after them.
        """
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
    """The inbox of all segments of a stream consumer.  See `OrderedSegment`."""

    def __init__(self, max_messages: int, max_bytes: int, reader: OrderedReader) -> None:
        super().__init__(max_messages, max_bytes)
        self._reader = reader
        self._taken_at = 0

    @property
    def is_stale(self) -> bool:
        """Whether everything comes again since the last message was taken."""
        return self._taken_at != self._reader.times_back

    def put_back(self, received: RawMessage[SegmentConsumer]) -> None:
        """Put back a message that could not be handed out, unless it comes again."""
        if not self.is_stale:
            super().put_back(received)

    def put(
        self, segment: SegmentConsumer, messages: Sequence[RawMessage[SegmentConsumer]]
    ) -> None:
        """Add the messages of an entry, unless the broker has gone back to an earlier one."""
        if not (isinstance(segment, OrderedSegment) and segment.goes_back(messages)):
            super().put(segment, messages)

    def take_nowait(self) -> RawMessage[SegmentConsumer] | None:
        """The next message to hand out, if there is one."""
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
