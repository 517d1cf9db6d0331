"""The same where the broker has no reads of segments (Apache Pulsar 5): over a reader.

Rules:

- A reader is a subscription that the broker does not keep.  It asks for RAW_READER_MESSAGES at a
  time, and for no more while it holds more bytes than `max_bytes`: with these and what is on its
  way it holds as much as it may.
- Where reading ends is what GET_LAST_MESSAGE_ID says: the last message that may be read.  What it
  says is too little on scalable topics of Apache Pulsar 5.0.0-M1: there it is what it was when
  somebody asked first.  That more is stored shows by where a reader at the latest message stands,
  and how much of it may be read by reading: a reader begins a little before the end, then ever
  further back, and acknowledges what comes.  What was aborted brokers acknowledge themselves, so
  where the reader stands then may be read up to there.  Nothing for PROBE_S means that an open
  transaction is in the way.  So the horizon may be told too low, never too high.
- Nothing is counted, budgets bound nothing, and times choose nothing: `NotSupported`.
- Brokers leave out by themselves what is aborted, and markers.  `raw` changes nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from magnetar.bounds import (
    LEAVE_S,
    PROBE_POLL_S,
    PROBE_S,
    PROBE_STEP,
    RAW_READER_MESSAGES,
)
from magnetar.consume.ack_tracker import Acknowledgement
from magnetar.consume.commands import (
    close_of,
    cumulative_ack_of,
    flow_of,
    subscribe_of,
)
from magnetar.consume.decoding import permits_of
from magnetar.consume.settings import SubscribeSettings, SubscriptionKind
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, NotSupported, OperationTimedOut, ServiceNotReady
from magnetar.message_id import EARLIEST_ENTRY, LATEST_ENTRY, EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import BROKER_METADATA_MAGIC
from magnetar.protocol.frames import Frame
from magnetar.protocol.ids import EARLIEST, LATEST, Position, from_wire
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import PlanLimits, RangePlan
from magnetar.retries import retried
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection, PeerKind

__all__ = ["plan_on_stock", "read_on_stock"]


async def plan_on_stock(
    context: ClientContext,
    topic: str,
    start: Position | None,
    end: Position | None,
    limits: PlanLimits,
) -> RangePlan:
    """The range from `start`, else the first entry, to `end`, or to the end of the segment."""
    if limits.from_publish_time_ms is not None or limits.before_publish_time_ms is not None:
        raise NotSupported(
            f"The broker of {topic} chooses no range by publish time; give positions, or use a "
            "Magnetar broker."
        )
    ends = await _ends_of(context, topic, start, LATEST if end is None else end)
    async with _reader(context, topic, EARLIEST, window=1) as reader:
        first = (await reader.stands()).read
        if first is None:
            first = EARLIEST if ends is None else (await reader.some())[0].position
    horizon, raw_end = (first, first) if ends is None else ends
    begin = first if start is None else start
    return RangePlan(
        start=begin,
        end=max(begin, horizon if end is None else min(end, horizon)),
        entries=None,
        messages=None,
        bytes=None,
        first_publish_time_ms=None,
        last_publish_time_ms=None,
        earliest=first,
        horizon=max(horizon, first),
        raw_end=raw_end,
        sealed=None,
        lost=begin < first and begin.ledger_id >= 0,
        backlog_messages=None,
        backlog_bytes=None,
        hidden_messages=None,
    )


async def read_on_stock(
    context: ClientContext, topic: str, start: Position, end: Position, max_bytes: int
) -> AsyncGenerator[list[StoredEntry], None]:
    """The entries from `start` on, as they come, up to `end` or the end of the segment by now."""
    ends = await _ends_of(context, topic, start, end)
    if ends is None:
        return
    async with _reader(context, topic, start, max_bytes, acknowledging=True) as reader:
        last = min(end, ends.horizon)
        position = start
        while position < last and (came := await reader.some(last)):
            position = came[-1].next_position
            for entries in _cut([each for each in came if each.position < last], max_bytes):
                yield entries


class _Ends(NamedTuple):
    """Of a segment: how far it may be read, and where what is stored ends."""

    horizon: Position
    raw_end: Position


async def _ends_of(
    context: ClientContext, topic: str, start: Position | None, wanted: Position
) -> _Ends | None:
    """Find where reading may begin and end; None: nothing may be read.

    `wanted`: what lies behind it need not be known.
    """
    async with _reader(context, topic, LATEST, window=1) as tail:
        told = await tail.stands()
    if told.read is None or (told.last is not None and told.last >= told.read):
        return None if told.last is None else _Ends(told.last, told.last)
    wanted = min(wanted, told.read)
    least = EARLIEST if start is None else start
    for place in _backwards(least, wanted):
        found = await _read_from(context, topic, place, wanted)
        if found > place:
            return _Ends(found, told.read)
    return _Ends(least, told.read)


def _backwards(start: Position, end: Position) -> Iterator[Position]:
    """Where to begin to read, one after the other: before the end, and at last at the start."""
    distance = 1
    while distance <= end.entry_id:
        place = Position(end.ledger_id, end.entry_id - distance)
        if place <= start:
            break
        yield place
        distance *= PROBE_STEP
    yield start


async def _read_from(
    context: ClientContext, topic: str, place: Position, wanted: Position
) -> Position:
    """How far it may be read from a place on, unless it is `wanted` and more; else the place."""
    async with _reader(context, topic, place, acknowledging=True) as reader:
        return await reader.read_up_to(wanted)


@asynccontextmanager
async def _reader(
    context: ClientContext,
    topic: str,
    start: Position,
    max_bytes: int = 1,
    window: int = RAW_READER_MESSAGES,
    *,
    acknowledging: bool = False,
) -> AsyncIterator["_RawReader"]:
    """A reader that is attached, and left afterwards."""
    reader = _RawReader(context, topic, start, max_bytes, window, acknowledging=acknowledging)
    try:
        await reader.open(context.settings.operation_timeout_s)
        yield reader
    finally:
        await reader.close()


def _cut(entries: Sequence[StoredEntry], max_bytes: int) -> Iterator[list[StoredEntry]]:
    """In lists of that many bytes, or of one entry."""
    part: list[StoredEntry] = []
    size = 0
    for entry in entries:
        size += len(entry.data)
        if part and size > max_bytes:
            yield part
            part, size = [], len(entry.data)
        part.append(entry)
    if part:
        yield part


class _Stands(NamedTuple):
    """What GET_LAST_MESSAGE_ID says."""

    last: Position | None
    """Behind the last message that may be read; None: there is none."""
    read: Position | None
    """Up to where everything is acknowledged; None: not told."""


class _RawReader(Attachment):
    """Entries of a segment as the broker sends them."""

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        start: Position,
        max_bytes: int,
        window: int,
        *,
        acknowledging: bool,
    ) -> None:
        super().__init__(context)
        self._acknowledging: Final = acknowledging
        self._topic: Final = topic
        self._max_bytes: Final = max_bytes
        self._window: Final = window
        """Messages that are asked for at a time."""
        self._consumer_id: Final = context.ids.consumer_id()
        self._next = start
        self._held: list[StoredEntry] = []
        self._held_bytes = 0
        self._permits = 0
        """Messages that the broker may send."""
        self._changed = asyncio.Event()
        self._how: Final = SubscribeSettings(
            subscription=f"reader-{context.rng.getrandbits(40):010x}",
            kind=SubscriptionKind.EXCLUSIVE,
            durable=False,
        )

    async def stands(self) -> _Stands:
        """Where the segment ends, and where this reader is in it."""

        async def ask() -> pb.BaseCommand:
            if self.connection is None:
                raise ServiceNotReady(f"{self.describe()} is not attached now; it comes back.")
            request = pb.CommandGetLastMessageId(consumer_id=self._consumer_id, request_id=0)
            return await self.connection.request(
                pb.BaseCommand(type=pb.BaseCommand.GET_LAST_MESSAGE_ID, get_last_message_id=request)
            )

        answer = await retried(self.context, ask, f"The end of {self._topic}")
        told = answer.get_last_message_id_response
        last = _position(told.last_message_id)
        read = _position(told.consumer_mark_delete_position)
        return _Stands(
            None if last.entry_id < 0 else Position(last.ledger_id, last.entry_id + 1),
            None if read.ledger_id < 0 else Position(read.ledger_id, read.entry_id + 1),
        )

    async def read_up_to(self, wanted: Position) -> Position:
        """Read until that is reached, or nothing has come for PROBE_S; how far it came."""
        loop = self.context.loop
        found, since = self._next, loop.time()
        while True:
            self._changed.clear()
            self._drop()
            before = found
            found = max(found, self._next, (await self.stands()).read or EARLIEST)
            now = loop.time()
            if found > before:
                since = now
            if found >= wanted or now - since >= PROBE_S:
                return found
            if self.state is AttachmentState.FAILED and self.error is not None:
                raise self.error
            await self._quiet()

    async def some(self, last: Position = LATEST) -> list[StoredEntry]:
        """What has come, one entry at least; none if there is nothing left before `last`.

        Raises `OperationTimedOut` if nothing comes.
        """
        timeout_s = self.context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._held:
                    if self.state is AttachmentState.FAILED and self.error is not None:
                        raise self.error
                    self._changed.clear()
                    if await self._quiet() and self._acknowledging:
                        read = (await self.stands()).read
                        if read is not None and read >= last and not self._held:
                            return []  # what is left there was aborted
        except TimeoutError as error:
            if isinstance(error, MagnetarError):
                raise
            raise OperationTimedOut(
                f"Nothing of {self._topic} came within {timeout_s:g} s, though its end was not "
                "reached; look whether its entries are still there."
            ) from self.error
        return self._drop()

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"A reader of {self._topic}"

    async def find(self) -> Connection:
        """The owner."""
        return await self.context.pool.of_topic(self._topic)

    async def attach(self, connection: Connection) -> None:
        """SUBSCRIBE, behind what came before."""
        connection.attach(PeerKind.CONSUMER, self._consumer_id, self)
        self._permits = 0
        after = LATEST_ENTRY if self._next == LATEST else EARLIEST_ENTRY
        if self._next != LATEST and self._next.ledger_id >= 0:
            after = EntryId(self._next.ledger_id, self._next.entry_id - 1)
        await connection.request(subscribe_of(self._topic, self._consumer_id, 0, self._how, after))

    def attached(self) -> None:
        """The broker knows of no permits."""
        self._ask()

    def failed(self, error: MagnetarError) -> None:
        """Whoever waits is told."""
        self._changed.set()

    async def leave(self, connection: Connection) -> None:
        """CLOSE_CONSUMER."""
        await connection.request(close_of(self._consumer_id), LEAVE_S)

    def received(self, frame: Frame) -> None:
        """Handler: an entry, or that the broker has closed it."""
        kind = frame.command.type
        if kind == pb.BaseCommand.CLOSE_CONSUMER:
            self.again(ServiceNotReady(f"The broker has closed {self.describe()}; it comes back."))
        elif kind == pb.BaseCommand.MESSAGE:
            if frame.entry is None:
                self.again(ServiceNotReady("An entry was damaged on its way; it is read again."))
                return
            self._take(frame.command.message.message_id, frame.entry, frame.broker_metadata)
            self._permits -= permits_of(frame.entry)
            self._ask()

    async def _quiet(self) -> bool:
        """Wait a little for something to happen; whether nothing has."""
        try:
            async with asyncio.timeout(PROBE_POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return True
        return False

    def _drop(self) -> list[StoredEntry]:
        """What it holds, to be held no more."""
        held, self._held = self._held, []
        self._held_bytes = 0
        self._ask()
        return held

    def _take(self, where: pb.MessageIdData, entry: bytes, before: bytes | None) -> None:
        position = _position(where)
        if self._acknowledging and self.connection is not None:
            acknowledgement = Acknowledgement((position.ledger_id, position.entry_id))
            self.connection.send(cumulative_ack_of(self._consumer_id, acknowledgement))
        if position < self._next:
            return
        self._next = Position(position.ledger_id, position.entry_id + 1)
        if before is not None:
            entry = b"".join((BROKER_METADATA_MAGIC, len(before).to_bytes(4, "big"), before, entry))
        self._held.append(StoredEntry(*position, entry))
        self._held_bytes += len(entry)
        self._changed.set()

    def _ask(self) -> None:
        """For more, if half of the window is used up and there is room."""
        connection = self.connection
        if connection is None or connection.is_lost or self._held_bytes >= self._max_bytes:
            return
        missing = self._window - self._permits
        if 2 * missing >= self._window:
            self._permits += missing
            connection.send(flow_of(self._consumer_id, missing))


def _position(told: pb.MessageIdData) -> Position:
    return Position(from_wire(told.ledger_id), from_wire(told.entry_id))
