"""`TopicSender`: the segment producers of one topic, over changes of its layout."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from magnetar.background_tasks import BackgroundTasks
from magnetar.bounds import LAYOUT_WAIT_S, RETRY_FIRST_S, SEALED_ASKED_AT_ONCE
from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    BrokerError,
    MagnetarError,
    OperationTimedOut,
    ProducerFenced,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.layout import Layout, Segment, SegmentIdentity
from magnetar.layout_watch import LayoutWatch
from magnetar.produce.names import last_stored_on_sealed
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.produce.segment_producer import SegmentProducer
from magnetar.produce.segment_router import SegmentRouter, SegmentState
from magnetar.produce.unanswered import UnansweredMessages
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.retries import retried
from magnetar.settings import member_of

__all__ = ["TopicSender"]


class TopicSender:
    """Routes messages to the producers of a topic's segments, as a `SegmentRouter` decides.

    A segment gets its producer with its first message; with exclusive access all segments have
    theirs from the start.  If a broker ends a segment, its messages wait for the layout without it,
    for LAYOUT_WAIT_S at most.  If the topic was deleted and created again, all producers are
    replaced, and the new ones get the messages of the old ones.

    `failed` is called when it has failed for good: it was fenced, or the topic was deleted.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        settings: ProducerSettings,
        schema: pb.Schema | None,
        unanswered: UnansweredMessages,
        failed: Callable[[MagnetarError], None],
    ) -> None:
        self.watch = LayoutWatch(context, topic)
        self._context = context
        self._settings = settings
        self._schema = schema
        self._unanswered = unanswered
        self._failed = failed
        self._router: SegmentRouter | None = None
        self._segments: dict[int, SegmentProducer] = {}
        self._last_retired = -1
        """The highest sequence id on sealed segments and on those whose producer was closed."""
        self._tasks = BackgroundTasks()
        self._waiting_for_layout: asyncio.TimerHandle | None = None
        self._listening: tuple[Callable[[], None], ...] = ()
        self._access_mode = member_of(AccessMode, settings.access_mode)
        self._is_open = False
        self._is_closed = False

    # For the producer

    async def open(self) -> None:
        """Get the layout.

        With exclusive access or a name it also opens the producers of all segments, one after the
        other.  With a name it asks the sealed segments too, so that `last_sequence_id` is known.
        """
        timeout_s = self._context.settings.operation_timeout_s
        await self.watch.open(timeout_s)
        run = self._settings.batch_max_messages if self._settings.batching else 1
        layout = self.watch.layout
        turn = self._context.rng.randrange(len(layout.active))
        self._router = SegmentRouter(layout, turn, run)
        self._listening = (
            self.watch.on_change(self._changed),
            self.watch.on_failure(self._failed),
        )
        if self._access_mode is not AccessMode.SHARED or self._settings.name:
            await self._open_all(timeout_s)
        if self._settings.name:
            await self._ask_sealed(self._settings.name, timeout_s)
        self._is_open = True

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id known to be stored on any segment; -1 if there is none."""
        known = (each.last_sequence_id for each in self._segments.values())
        return max(self._last_retired, *known, -1)

    def send(self, message: OutgoingMessage) -> None:
        """Give a message to the producer of its segment, or hold it."""
        router = self._router or self._known_router()
        segment = router.place(message)
        if segment is None:
            self._await_layout()
            return
        producer = self._segments.get(segment.segment_id)
        (producer or self._start_producer(segment)).give(message)

    def flush(self) -> None:
        """Send all queues without waiting for more messages."""
        for producer in tuple(self._segments.values()):
            producer.flush()

    def trouble(self) -> MagnetarError | None:
        """The last error of a segment producer that is not attached now, if there is one."""
        for producer in self._segments.values():
            if producer.connection is None and producer.error is not None:
                return producer.error
        return None

    def prune(self) -> None:
        """Drop messages for which no caller waits."""
        for producer in tuple(self._segments.values()):
            producer.prune()
        if self._router is not None:
            for message in self._router.prune():
                self._unanswered.release(message)

    async def close(self) -> None:
        """Close all segment producers at their brokers; bounded in time."""
        self._is_closed = True
        for end in self._listening:
            end()
        if self._waiting_for_layout is not None:
            self._waiting_for_layout.cancel()
        closing: list[Coroutine[None, None, None]] = [self.watch.close()]
        closing += [producer.close() for producer in self._segments.values()]
        self._segments.clear()
        await asyncio.gather(*closing)
        await self._tasks.wait()

    # SegmentOwner

    def stored(self, segment: Segment, sent: SentEntry, where: pb.MessageIdData) -> None:
        """Set the results of a SEND."""
        self._unanswered.stored(segment.segment_id, sent, where)

    def refused(self, messages: Sequence[OutgoingMessage], error: MagnetarError) -> None:
        """Fail messages that are not stored."""
        self._unanswered.fail(messages, error)

    def dropped(self, message: OutgoingMessage) -> None:
        """Stop counting a message that was not sent."""
        self._unanswered.release(message)

    def ended(self, segment: Segment, unsent: Sequence[OutgoingMessage]) -> None:
        """Hold the messages of a segment that its broker has ended, until the layout comes."""
        self._retire(segment)
        self.watch.hurry()
        router = self._known_router()
        if router.ended(segment.segment_id):
            router.drained(segment.segment_id, unsent)
            self._release()
            self._await_layout()
        else:
            self._unanswered.fail(unsent, _ended(segment))

    def lost(
        self, segment: Segment, unsent: Sequence[OutgoingMessage], error: MagnetarError
    ) -> None:
        """Fail the messages of a producer that cannot be attached; the next message tries again."""
        self._retire(segment)
        self._unanswered.fail(unsent, error)
        router = self._known_router()
        if router.state_of(segment.segment_id) is SegmentState.DRAINING:
            router.drained(segment.segment_id, ())
            self._release()
        if isinstance(error, ProducerFenced) and self._is_open:
            self._failed(error)

    # Segments

    def _start_producer(self, segment: Segment) -> SegmentProducer:
        """Make a producer and open it in the background; its messages wait until it is open."""
        producer = self._make_producer(segment)
        self._tasks.start(_open(producer))
        return producer

    def _make_producer(self, segment: Segment) -> SegmentProducer:
        producer = SegmentProducer(self._context, segment, self._settings, self._schema, self)
        self._segments[segment.segment_id] = producer
        return producer

    def _retire(self, segment: Segment) -> None:
        producer = self._segments.pop(segment.segment_id, None)
        if producer is not None:
            self._last_retired = max(self._last_retired, producer.last_sequence_id)
            self._tasks.start(producer.close())

    async def _open_all(self, timeout_s: float) -> None:
        """Open the producers of all segments, one after the other."""
        # In the order of hashes, so that two producers that wait never wait for each other.
        waits = self._access_mode is AccessMode.WAIT_FOR_EXCLUSIVE
        ended_at: dict[SegmentIdentity, float] = {}
        while (segment := self._next_unopened()) is not None:
            try:
                await self._make_producer(segment).open(None if waits else timeout_s)
            except AlreadyClosed:
                if self._is_closed or self._is_active(segment):
                    raise
                # A new layout has other segments in its place.
            except (TopicTerminated, TopicNotFound):
                now = self._context.loop.time()
                since = ended_at.setdefault(segment.identity, now)
                if segment.legacy or now > since + timeout_s:
                    raise
                # The broker has ended the segment; the layout without it will come.
                await asyncio.sleep(RETRY_FIRST_S)
            if self._is_closed:
                raise AlreadyClosed(f"The producer of {self.watch.topic} was closed; open another.")

    async def _ask_sealed(self, name: str, timeout_s: float) -> None:
        """Ask the sealed segments for the last sequence ids of earlier producers of the name."""
        limit = asyncio.Semaphore(SEALED_ASKED_AT_ONCE)

        async def ask(segment: Segment) -> int:
            async with limit:
                return await retried(
                    self._context,
                    partial(last_stored_on_sealed, self._context, segment, name),
                    f"Asking {segment.topic} for its last sequence id",
                    timeout_s=timeout_s,
                )

        sealed = [each for each in self._known_router().layout.sealed if not each.legacy]
        found = await asyncio.gather(*map(ask, sealed))
        self._last_retired = max(self._last_retired, *found, -1)

    def _is_active(self, segment: Segment) -> bool:
        known = self._known_router().layout.segments.get(segment.segment_id)
        return known is not None and known.active and known.identity == segment.identity

    def _next_unopened(self) -> Segment | None:
        for segment in self._known_router().layout.active:
            if segment.segment_id not in self._segments:
                return segment
        return None

    # Layouts

    def _known_router(self) -> SegmentRouter:
        if self._router is None:
            raise OperationTimedOut("The layout of the topic is not known; await open() first.")
        return self._router

    def _changed(self, layout: Layout) -> None:
        router = self._known_router()
        if self._waiting_for_layout is not None:
            self._waiting_for_layout.cancel()
            self._waiting_for_layout = None
        if layout.is_anew_after(router.layout):
            self._restart(layout)
            return
        draining = router.change_layout(layout)
        followed = [s for s in draining if s.segment_id in self._segments]
        for segment in draining:
            producer = self._segments.get(segment.segment_id)
            if producer is None:  # It was never written to.
                router.drained(segment.segment_id, ())
            else:
                producer.drain(partial(self._drained, segment))
        for segment in layout.active:
            wanted = self._access_mode is not AccessMode.SHARED or any(
                _follows(segment, before) for before in followed
            )
            if wanted and segment.segment_id not in self._segments and self._is_open:
                self._start_producer(segment)
        self._release()

    def _restart(self, layout: Layout) -> None:
        """Replace all producers: the topic was deleted and created again."""
        unsent: list[OutgoingMessage] = []
        before, self._segments = self._segments, {}
        for producer in before.values():
            unsent += producer.abandon()
            self._tasks.start(producer.close())
        self._known_router().restart(layout, unsent)
        if self._access_mode is not AccessMode.SHARED and self._is_open:
            for segment in layout.active:
                self._start_producer(segment)
        self._release()

    def _drained(self, segment: Segment, unsent: Sequence[OutgoingMessage]) -> None:
        self._retire(segment)
        self._known_router().drained(segment.segment_id, unsent)
        self._release()

    def _release(self) -> None:
        """Give held messages to the segments that take them now."""
        for segment, message in self._known_router().take_released():
            producer = self._segments.get(segment.segment_id)
            (producer or self._start_producer(segment)).give(message)
        self._await_layout()

    def _await_layout(self) -> None:
        """Bound the wait of messages that are held because a broker ended a segment."""
        router = self._known_router()
        if self._waiting_for_layout is None and router.held and router.awaits_layout:
            self._waiting_for_layout = self._context.loop.call_later(LAYOUT_WAIT_S, self._strand)

    def _strand(self) -> None:
        self._waiting_for_layout = None
        stranded = self._known_router().take_stranded()
        self._unanswered.fail(
            stranded,
            TopicTerminated(
                f"The broker accepts no more messages for {self.watch.topic}, and no layout with "
                "other segments has come; check the topic's segments at the broker."
            ),
        )
        self._release()


async def _open(producer: SegmentProducer) -> None:
    try:
        await producer.open(None)
    except MagnetarError:
        pass  # `lost` or `ended` has handled its messages.


def _follows(segment: Segment, before: Segment) -> bool:
    return before.hash_start <= segment.hash_end and segment.hash_start <= before.hash_end


def _ended(segment: Segment) -> BrokerError:
    return TopicTerminated(
        f"The broker accepts no more messages for {segment.topic}; send them again."
    )
