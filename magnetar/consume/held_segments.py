"""The segment consumers of an ordered consumer, as its assignments want them.

Rules:

- Each assigned segment has one segment consumer, opened at once and for as long as it takes:
  another consumer may still be leaving it (`ConsumerBusy`, `ConsumerAssignFailed`).
- What becomes of a segment that is not there is its reader's to say (`Reader.missing`).
- Any other refusal for good fails the whole consumer, as it would silently lack a segment.
- A segment that is taken away is parted with as its reader does it, and then closed; one that was
  not open yet is closed at once.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Protocol

from magnetar.consume.holdings import AssignedSegment, Effect, Holdings, Leave, Open
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.context import ClientContext
from magnetar.errors import ConsumerAssignFailed, ConsumerBusy, MagnetarError, TopicNotFound
from magnetar.opening import completed
from magnetar.wire.attachment import is_retriable
from magnetar.wire.backoff import Backoff

__all__ = ["HeldSegments", "Reader"]


class Reader(Protocol):
    """Whose segments they are."""

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


class _Held:
    """One segment: from its assignment until it is closed."""

    __slots__ = ("backoff", "consumer", "missing", "opened", "segment", "settled", "task")

    def __init__(self, segment: AssignedSegment, context: ClientContext) -> None:
        self.segment = segment
        self.backoff = Backoff(context.rng)
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
    """See the module's rules."""

    def __init__(self, context: ClientContext, reader: Reader) -> None:
        self._context = context
        self._reader = reader
        self._holdings = Holdings()
        self._held: dict[int, _Held] = {}
        self._closed = False
        self._failure: MagnetarError | None = None

    def consumer_of(self, segment_id: int) -> SegmentConsumer | None:
        """The consumer of a segment, open or not, until the segment is closed."""
        held = self._held.get(segment_id)
        return None if held is None else held.consumer

    @property
    def consumers(self) -> list[SegmentConsumer]:
        """Of all segments that are not closed."""
        return [held.consumer for held in self._held.values() if held.consumer is not None]

    @property
    def ids(self) -> frozenset[int]:
        """Of the segments that are assigned."""
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
                case Open(segment):
                    held = self._held[segment.segment_id] = _Held(segment, self._context)
                    held.task = self._context.loop.create_task(self._open(held, pause=False))
                case Leave(segment):
                    held = self._held[segment.segment_id]
                    opening, held.task = held.task, None
                    held.task = self._context.loop.create_task(self._leave(held, opening))

    async def _open(self, held: _Held, *, pause: bool) -> None:
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

    def _goes_on(self, held: _Held, error: MagnetarError) -> bool:
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

    async def _leave(self, held: _Held, opening: asyncio.Task[None] | None) -> None:
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

    async def _close(self, held: _Held) -> None:
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
