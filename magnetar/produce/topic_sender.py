"""The segment producers of one topic, and what of a message goes where when its layout changes.

Rules:

- `Switching` decides; this carries out.  A segment gets its producer with its first message; where
  the producer wants the topic for itself, all segments have theirs from the start.
- A segment that drains and was never written to is drained at once.  Children of one that was
  written to are opened while it drains.
- Messages for a segment that its broker has ended wait for the layout that says so, for a bounded
  time.
- Under a name the sealed segments are asked, too, what earlier producers of it have stored there.
- A topic that was deleted and made anew gets other producers; what the old ones had goes to them.
- A producer that is fenced, or whose topic is deleted, has failed for good.
"""

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
from magnetar.layout import Layout, Segment
from magnetar.layout_watch import LayoutWatch
from magnetar.produce.names import last_stored_on_sealed
from magnetar.produce.outgoing import Outgoing, Sent
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.produce.segment_producer import SegmentProducer
from magnetar.produce.switching import SegmentState, Switching
from magnetar.produce.unanswered import Unanswered
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.retries import retried
from magnetar.settings import member_of

__all__ = ["TopicSender"]


class TopicSender:
    """Routes messages to the producers of a topic's segments, and again when the layout changes.

    `failed` is told when it has failed for good.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        settings: ProducerSettings,
        schema: pb.Schema | None,
        unanswered: Unanswered,
        failed: Callable[[MagnetarError], None],
    ) -> None:
        self.watch = LayoutWatch(context, topic)
        self._context = context
        self._settings = settings
        self._schema = schema
        self._unanswered = unanswered
        self._failed = failed
        self._switching: Switching | None = None
        self._segments: dict[int, SegmentProducer] = {}
        self._last_retired = -1
        """The highest sequence id on segments that were given up, as they were sealed."""
        self._tasks = BackgroundTasks()
        self._waiting_for_layout: asyncio.TimerHandle | None = None
        self._listening: tuple[Callable[[], None], ...] = ()
        self._access_mode = member_of(AccessMode, settings.access_mode)
        self._is_open = False
        self._is_closed = False

    # For the producer

    async def open(self) -> None:
        """Learn the layout.

        All segments are opened at once for exclusive access, and under a name: then
        `last_sequence_id` is known.  Sealed ones are asked for it, too, as far as they are there.
        """
        timeout_s = self._context.settings.operation_timeout_s
        await self.watch.open(timeout_s)
        run = self._settings.batch_max_messages if self._settings.batching else 1
        layout = self.watch.layout
        turn = self._context.rng.randrange(len(layout.active))
        self._switching = Switching(layout, turn, run)
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
        """The highest sequence id that is stored on any segment, as far as is known; -1: none."""
        known = (each.last_sequence_id for each in self._segments.values())
        return max(self._last_retired, *known, -1)

    def send(self, message: Outgoing) -> None:
        """To its segment, or into the hold."""
        switching = self._switching or self._known_switching()
        segment = switching.place(message)
        if segment is None:
            self._await_layout()
            return
        producer = self._segments.get(segment.segment_id)
        (producer or self._opened(segment)).give(message)

    def flush(self) -> None:
        """Nothing waits for more messages."""
        for producer in tuple(self._segments.values()):
            producer.flush()

    def trouble(self) -> MagnetarError | None:
        """Why some segment is not attached now, if one is not."""
        for producer in self._segments.values():
            if producer.connection is None and producer.error is not None:
                return producer.error
        return None

    def prune(self) -> None:
        """Let go of what nobody waits for any more."""
        for producer in tuple(self._segments.values()):
            producer.prune()
        if self._switching is not None:
            for message in self._switching.prune():
                self._unanswered.release(message)

    async def close(self) -> None:
        """Take leave of all brokers; bounded in time."""
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

    def stored(self, segment: Segment, sent: Sent, where: pb.MessageIdData) -> None:
        """A SEND has its receipt."""
        self._unanswered.stored(segment.segment_id, sent, where)

    def refused(self, messages: Sequence[Outgoing], error: MagnetarError) -> None:
        """These are not stored."""
        self._unanswered.fail(messages, error)

    def dropped(self, message: Outgoing) -> None:
        """Nobody waited for it."""
        self._unanswered.release(message)

    def ended(self, segment: Segment, unsent: Sequence[Outgoing]) -> None:
        """The broker takes no more for the segment: what it had waits for the layout."""
        self._retire(segment)
        self.watch.hurry()
        switching = self._known_switching()
        if switching.ended(segment.segment_id):
            switching.drained(segment.segment_id, unsent)
            self._release()
            self._await_layout()
        else:
            self._unanswered.fail(unsent, _ended(segment))

    def lost(self, segment: Segment, unsent: Sequence[Outgoing], error: MagnetarError) -> None:
        """Its producer cannot be attached; with the next message another one is tried."""
        self._retire(segment)
        self._unanswered.fail(unsent, error)
        switching = self._known_switching()
        if switching.state_of(segment.segment_id) is SegmentState.DRAINING:
            switching.drained(segment.segment_id, ())
            self._release()
        if isinstance(error, ProducerFenced) and self._is_open:
            self._failed(error)

    # Segments

    def _opened(self, segment: Segment) -> SegmentProducer:
        """A producer that is being opened; what it is given waits until it is."""
        producer = self._made(segment)
        self._tasks.start(_open(producer))
        return producer

    def _made(self, segment: Segment) -> SegmentProducer:
        producer = SegmentProducer(self._context, segment, self._settings, self._schema, self)
        self._segments[segment.segment_id] = producer
        return producer

    def _retire(self, segment: Segment) -> None:
        producer = self._segments.pop(segment.segment_id, None)
        if producer is not None:
            self._last_retired = max(self._last_retired, producer.last_sequence_id)
            self._tasks.start(producer.close())

    async def _open_all(self, timeout_s: float) -> None:
        """One after the other, in order of hashes: two that wait never wait for each other."""
        waits = self._access_mode is AccessMode.WAIT_FOR_EXCLUSIVE
        ended_at: dict[tuple[int, str, int], float] = {}
        while (segment := self._next_unopened()) is not None:
            try:
                await self._made(segment).open(None if waits else timeout_s)
            except AlreadyClosed:
                if self._is_closed or self._is_active(segment):
                    raise
                # The layout has others instead of it now.
            except (TopicTerminated, TopicNotFound):
                now = self._context.loop.time()
                since = ended_at.setdefault(segment.identity, now)
                if segment.legacy or now > since + timeout_s:
                    raise
                # The broker has ended the segment; its layout is on its way.
                await asyncio.sleep(RETRY_FIRST_S)
            if self._is_closed:
                raise AlreadyClosed(f"The producer of {self.watch.topic} was closed; open another.")

    async def _ask_sealed(self, name: str, timeout_s: float) -> None:
        """What earlier producers of the name have stored on segments that are sealed now."""
        room = asyncio.Semaphore(SEALED_ASKED_AT_ONCE)

        async def ask(segment: Segment) -> int:
            async with room:
                return await retried(
                    self._context,
                    partial(last_stored_on_sealed, self._context, segment, name),
                    f"Asking {segment.topic} for its last sequence id",
                    timeout_s=timeout_s,
                )

        sealed = [each for each in self._known_switching().layout.sealed if not each.legacy]
        found = await asyncio.gather(*map(ask, sealed))
        self._last_retired = max(self._last_retired, *found, -1)

    def _is_active(self, segment: Segment) -> bool:
        known = self._known_switching().layout.segments.get(segment.segment_id)
        return known is not None and known.active and known.identity == segment.identity

    def _next_unopened(self) -> Segment | None:
        for segment in self._known_switching().layout.active:
            if segment.segment_id not in self._segments:
                return segment
        return None

    # Layouts

    def _known_switching(self) -> Switching:
        if self._switching is None:
            raise OperationTimedOut("The layout of the topic is not known; await open() first.")
        return self._switching

    def _changed(self, layout: Layout) -> None:
        switching = self._known_switching()
        if self._waiting_for_layout is not None:
            self._waiting_for_layout.cancel()
            self._waiting_for_layout = None
        if layout.is_anew_after(switching.layout):
            self._made_anew(layout)
            return
        draining = switching.changed(layout)
        followed = [s for s in draining if s.segment_id in self._segments]
        for segment in draining:
            producer = self._segments.get(segment.segment_id)
            if producer is None:
                switching.drained(segment.segment_id, ())
            else:
                producer.drain(partial(self._drained, segment))
        for segment in layout.active:
            wanted = self._access_mode is not AccessMode.SHARED or any(
                _follows(segment, before) for before in followed
            )
            if wanted and segment.segment_id not in self._segments and self._is_open:
                self._opened(segment)
        self._release()

    def _made_anew(self, layout: Layout) -> None:
        """The topic was deleted and made anew: whatever was attached is of no use any more."""
        unsent: list[Outgoing] = []
        before, self._segments = self._segments, {}
        for producer in before.values():
            unsent += producer.abandon()
            self._tasks.start(producer.close())
        self._known_switching().made_anew(layout, unsent)
        if self._access_mode is not AccessMode.SHARED and self._is_open:
            for segment in layout.active:
                self._opened(segment)
        self._release()

    def _drained(self, segment: Segment, unsent: Sequence[Outgoing]) -> None:
        self._retire(segment)
        self._known_switching().drained(segment.segment_id, unsent)
        self._release()

    def _release(self) -> None:
        """Give what was held to the segments that take it now."""
        for segment, message in self._known_switching().released():
            producer = self._segments.get(segment.segment_id)
            (producer or self._opened(segment)).give(message)
        self._await_layout()

    def _await_layout(self) -> None:
        """Bound the wait of what is held because a broker ended a segment."""
        switching = self._known_switching()
        if self._waiting_for_layout is None and switching.held and switching.awaits_layout:
            self._waiting_for_layout = self._context.loop.call_later(LAYOUT_WAIT_S, self._strand)

    def _strand(self) -> None:
        self._waiting_for_layout = None
        stranded = self._known_switching().take_stranded()
        self._unanswered.fail(
            stranded,
            TopicTerminated(
                f"The broker takes no more messages for {self.watch.topic}, and no layout that "
                "says where they are to go has come; look at the topic's segments at the broker."
            ),
        )
        self._release()


async def _open(producer: SegmentProducer) -> None:
    try:
        await producer.open(None)
    except MagnetarError:
        pass  # its messages have been told by `lost` or `ended`


def _follows(segment: Segment, before: Segment) -> bool:
    return before.hash_start <= segment.hash_end and segment.hash_start <= before.hash_end


def _ended(segment: Segment) -> BrokerError:
    return TopicTerminated(
        f"The broker takes no more messages for {segment.topic}; send them again."
    )
