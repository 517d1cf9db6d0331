"""Plans and reads of segments over a reader, for brokers without segment reads (Apache Pulsar 5).

A reader is a subscription that is not durable.
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

__all__ = ["plan_by_reader", "read_by_reader"]


async def plan_by_reader(
    context: ClientContext,
    topic: str,
    start: Position | None,
    end: Position | None,
    limits: PlanLimits,
) -> RangePlan:
    """The range from `start`, else the first entry, to `end`, or to the end of the segment.

    Nothing is counted, and `max_messages` and `max_bytes` bound nothing.  The max read position may
    be too low, never too high.  Raises `NotSupported` for publish times.
    """
    if limits.from_publish_time_ms is not None or limits.before_publish_time_ms is not None:
        raise NotSupported(
            f"The broker of {topic} cannot plan a range by publish time; give positions, or use a "
            "Magnetar broker."
        )
    ends = await _ends_of(context, topic, start, LATEST if end is None else end)
    async with _reader(context, topic, EARLIEST, window=1) as reader:
        first = (await reader.position()).read
        if first is None:
            first = EARLIEST if ends is None else (await reader.take_entries())[0].position
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


async def read_by_reader(
    context: ClientContext, topic: str, start: Position, end: Position, max_bytes: int
) -> AsyncGenerator[list[StoredEntry], None]:
    """The entries from `start` on, as they come, up to `end` or the present end of the segment.

    Brokers send a reader neither aborted messages nor markers.
    """
    ends = await _ends_of(context, topic, start, end)
    if ends is None:
        return
    async with _reader(context, topic, start, max_bytes, acknowledging=True) as reader:
        last = min(end, ends.horizon)
        position = start
        while position < last and (came := await reader.take_entries(last)):
            position = came[-1].next_position
            for entries in _parts_of([each for each in came if each.position < last], max_bytes):
                yield entries


class _Ends(NamedTuple):
    """The max read position of a segment, and the end of its stored entries."""

    horizon: Position
    raw_end: Position


async def _ends_of(
    context: ClientContext, topic: str, start: Position | None, wanted: Position
) -> _Ends | None:
    """Find the ends of a segment; None if no message can be read.

    The max read position need not be known beyond `wanted`.
    """
    async with _reader(context, topic, LATEST, window=1) as tail:
        latest = await tail.position()
    if latest.read is None or (latest.last is not None and latest.last >= latest.read):
        return None if latest.last is None else _Ends(latest.last, latest.last)
    # On scalable topics of Apache Pulsar 5.0.0-M1 GET_LAST_MESSAGE_ID keeps its first answer.  The
    # position of a reader at the latest message shows that more is stored.  How much of that can be
    # read shows only by reading it.
    wanted = min(wanted, latest.read)
    least = EARLIEST if start is None else start
    for begin in _backwards(least, wanted):
        found = await _read_from(context, topic, begin, wanted)
        if found > begin:
            return _Ends(found, latest.read)
    return _Ends(least, latest.read)


def _backwards(start: Position, end: Position) -> Iterator[Position]:
    """Positions to begin a probe at: shortly before the end, then further back, last the start."""
    distance = 1
    while distance <= end.entry_id:
        begin = Position(end.ledger_id, end.entry_id - distance)
        if begin <= start:
            break
        yield begin
        distance *= PROBE_STEP
    yield start


async def _read_from(
    context: ClientContext, topic: str, begin: Position, wanted: Position
) -> Position:
    """The position up to which it can be read from `begin` on; it need not exceed `wanted`."""
    async with _reader(context, topic, begin, acknowledging=True) as reader:
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
    """An open reader, closed afterwards."""
    reader = _RawReader(context, topic, start, max_bytes, window, acknowledging=acknowledging)
    try:
        await reader.open(context.settings.operation_timeout_s)
        yield reader
    finally:
        await reader.close()


def _parts_of(entries: Sequence[StoredEntry], max_bytes: int) -> Iterator[list[StoredEntry]]:
    """The entries in lists of at most that many bytes, or of one entry."""
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


class _ReaderPosition(NamedTuple):
    """The answer to GET_LAST_MESSAGE_ID."""

    last: Position | None
    """The position after the last message that can be read; None if there is none."""
    read: Position | None
    """The position up to which everything is acknowledged; None if the broker does not say."""


class _RawReader(Attachment):
    """Reads entries of a segment as the broker sends them.

    It gives `window` permits at a time, and no more while it holds `max_bytes` of entries.
    """

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
        """Permits given at a time."""
        self._consumer_id: Final = context.ids.consumer_id()
        self._next = start
        self._held: list[StoredEntry] = []
        self._held_bytes = 0
        self._permits = 0
        """Messages that the broker may still send."""
        self._changed = asyncio.Event()
        self._how: Final = SubscribeSettings(
            subscription=f"reader-{context.rng.getrandbits(40):010x}",
            kind=SubscriptionKind.EXCLUSIVE,
            durable=False,
        )

    async def position(self) -> _ReaderPosition:
        """Ask for the end of the segment and the position of this reader in it."""

        async def ask() -> pb.BaseCommand:
            if self.connection is None:
                raise ServiceNotReady(f"{self.describe()} is not attached now; it comes back.")
            request = pb.CommandGetLastMessageId(consumer_id=self._consumer_id, request_id=0)
            return await self.connection.request(
                pb.BaseCommand(type=pb.BaseCommand.GET_LAST_MESSAGE_ID, get_last_message_id=request)
            )

        answer = await retried(self.context, ask, f"The end of {self._topic}")
        response = answer.get_last_message_id_response
        last = _position(response.last_message_id)
        read = _position(response.consumer_mark_delete_position)
        return _ReaderPosition(
            None if last.entry_id < 0 else last.following,
            None if read.ledger_id < 0 else read.following,
        )

    async def read_up_to(self, wanted: Position) -> Position:
        """Read up to `wanted`, or until nothing has come for PROBE_S; returns the position reached.

        Silence means that an open transaction is in the way.
        """
        loop = self.context.loop
        found, since = self._next, loop.time()
        while True:
            self._changed.clear()
            self._drop()
            before = found
            # A broker acknowledges aborted messages itself, so what is acknowledged can be read.
            found = max(found, self._next, (await self.position()).read or EARLIEST)
            now = loop.time()
            if found > before:
                since = now
            if found >= wanted or now - since >= PROBE_S:
                return found
            if self.state is AttachmentState.FAILED and self.error is not None:
                raise self.error
            await self._wait_for_change()

    async def take_entries(self, last: Position = LATEST) -> list[StoredEntry]:
        """Take the entries that have come, at least one; none if nothing is left before `last`.

        Raises `OperationTimedOut` if nothing comes.
        """
        timeout_s = self.context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._held:
                    if self.state is AttachmentState.FAILED and self.error is not None:
                        raise self.error
                    self._changed.clear()
                    if not await self._wait_for_change() and self._acknowledging:
                        read = (await self.position()).read
                        if read is not None and read >= last and not self._held:
                            return []  # The rest was aborted.
        except TimeoutError as error:
            if isinstance(error, MagnetarError):
                raise
            raise OperationTimedOut(
                f"No entry of {self._topic} came within {timeout_s:g} s, though its end was not "
                "reached; check whether its entries are still there."
            ) from self.error
        return self._drop()

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"A reader of {self._topic}"

    async def find(self) -> Connection:
        """A connection to the owner of the segment."""
        return await self.context.pool.of_topic(self._topic)

    async def attach(self, connection: Connection) -> None:
        """Send SUBSCRIBE, from the next entry on."""
        connection.attach(PeerKind.CONSUMER, self._consumer_id, self)
        self._permits = 0
        after = LATEST_ENTRY if self._next == LATEST else EARLIEST_ENTRY
        if self._next != LATEST and self._next.ledger_id >= 0:
            after = EntryId(self._next.ledger_id, self._next.entry_id - 1)
        await connection.request(subscribe_of(self._topic, self._consumer_id, 0, self._how, after))

    def attached(self) -> None:
        """Give permits: a new consumer has none."""
        self._give_permits()

    def failed(self, error: MagnetarError) -> None:
        """Wake the waiting reader, which raises the error."""
        self._changed.set()

    async def leave(self, connection: Connection) -> None:
        """Send CLOSE_CONSUMER."""
        await connection.request(close_of(self._consumer_id), LEAVE_S)

    def received(self, frame: Frame) -> None:
        """Take an entry, or a close by the broker."""
        kind = frame.command.type
        if kind == pb.BaseCommand.CLOSE_CONSUMER:
            self.again(ServiceNotReady(f"The broker has closed {self.describe()}; it comes back."))
        elif kind == pb.BaseCommand.MESSAGE:
            if frame.entry is None:
                self.again(ServiceNotReady("An entry was damaged on its way; it is read again."))
                return
            self._take(frame.command.message.message_id, frame.entry, frame.broker_metadata)
            self._permits -= permits_of(frame.entry)
            self._give_permits()

    async def _wait_for_change(self) -> bool:
        """Wait up to PROBE_POLL_S for an entry or a failure; returns whether one came."""
        try:
            async with asyncio.timeout(PROBE_POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _drop(self) -> list[StoredEntry]:
        """Remove and return the entries that it holds."""
        held, self._held = self._held, []
        self._held_bytes = 0
        self._give_permits()
        return held

    def _take(self, where: pb.MessageIdData, entry: bytes, before: bytes | None) -> None:
        position = _position(where)
        if self._acknowledging and self.connection is not None:
            acknowledgement = Acknowledgement((position.ledger_id, position.entry_id))
            self.connection.send(cumulative_ack_of(self._consumer_id, acknowledgement))
        if position < self._next:
            return
        self._next = position.following
        if before is not None:
            entry = b"".join((BROKER_METADATA_MAGIC, len(before).to_bytes(4, "big"), before, entry))
        self._held.append(StoredEntry(*position, entry))
        self._held_bytes += len(entry)
        self._changed.set()

    def _give_permits(self) -> None:
        """Give permits if half of the window is used up and it holds less than `max_bytes`."""
        connection = self.connection
        if connection is None or connection.is_lost or self._held_bytes >= self._max_bytes:
            return
        missing = self._window - self._permits
        if 2 * missing >= self._window:
            self._permits += missing
            connection.send(flow_of(self._consumer_id, missing))


def _position(data: pb.MessageIdData) -> Position:
    return Position(from_wire(data.ledger_id), from_wire(data.entry_id))
