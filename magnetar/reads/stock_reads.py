"""The same where the broker has no reads of segments (Apache Pulsar 5): over a reader.

Rules:

- A reader is a subscription that the broker does not keep.  It asks for RAW_READER_MESSAGES at a
  time, and for no more while it holds more bytes than `max_bytes`: with these and what is on its
  way it holds as much as it may.
- The end of a segment is what GET_LAST_MESSAGE_ID says: the last message that may be read.  So the
  horizon is where the segment ends, and what is hidden is not known.
- If that message is one that the broker gives to no reader (a marker, or an aborted one, right
  before an open transaction), it does not come, and nothing says so: the read waits for the
  operation timeout and fails with `OperationTimedOut`, until something readable is behind it.
- Nothing is counted, budgets bound nothing, and times choose nothing: `NotSupported`.
- Brokers leave out by themselves what is aborted, and markers.  `raw` changes nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

from magnetar.bounds import LEAVE_S, RAW_READER_MESSAGES
from magnetar.consume.consumer_commands import close_of, flow_of, subscribe_of
from magnetar.consume.consumer_settings import SubscribeSettings, SubscriptionKind
from magnetar.consume.decoding import permits_of
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, NotSupported, OperationTimedOut, ServiceNotReady
from magnetar.message_id import EARLIEST_ENTRY, EntryId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import PlanLimits, RangePlan
from magnetar.retries import retried
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection, PeerKind
from protocol import pulsar_pb2 as pb
from protocol.checksum import BROKER_METADATA_MAGIC
from protocol.frames import Frame
from protocol.ids import EARLIEST, Position, from_wire

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
    reader = _RawReader(context, topic, EARLIEST, 1, window=1)
    try:
        await reader.open(context.settings.operation_timeout_s)
        horizon = await reader.end()
        first = EARLIEST if horizon is None else (await reader.some())[0].position
    finally:
        await reader.close()
    horizon = first if horizon is None else horizon
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
        horizon=horizon,
        raw_end=horizon,
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
    reader = _RawReader(context, topic, start, max_bytes)
    try:
        await reader.open(context.settings.operation_timeout_s)
        horizon = await reader.end()
        if horizon is None:
            return
        last = min(end, horizon)
        position = start
        while position < last:
            came = await reader.some()
            position = came[-1].next_position
            for entries in _cut([each for each in came if each.position < last], max_bytes):
                yield entries
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


class _RawReader(Attachment):
    """Entries of a segment as the broker sends them."""

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        start: Position,
        max_bytes: int,
        window: int = RAW_READER_MESSAGES,
    ) -> None:
        super().__init__(context)
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

    async def end(self) -> Position | None:
        """Behind the last message that may be read; None: there is none."""

        async def ask() -> pb.BaseCommand:
            if self.connection is None:
                raise ServiceNotReady(f"{self.describe()} is not attached now; it comes back.")
            request = pb.CommandGetLastMessageId(consumer_id=self._consumer_id, request_id=0)
            return await self.connection.request(
                pb.BaseCommand(type=pb.BaseCommand.GET_LAST_MESSAGE_ID, get_last_message_id=request)
            )

        answer = await retried(self.context, ask, f"The end of {self._topic}")
        told = answer.get_last_message_id_response.last_message_id
        last = Position(from_wire(told.ledger_id), from_wire(told.entry_id))
        return None if last.entry_id < 0 else Position(last.ledger_id, last.entry_id + 1)

    async def some(self) -> list[StoredEntry]:
        """What has come, one entry at least.  Raises `OperationTimedOut` if nothing comes."""
        timeout_s = self.context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._held:
                    if self.state is AttachmentState.FAILED and self.error is not None:
                        raise self.error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            if isinstance(error, MagnetarError):
                raise
            raise OperationTimedOut(
                f"Nothing of {self._topic} came within {timeout_s:g} s, though its end was not "
                "reached; look whether its entries are still there."
            ) from self.error
        held, self._held = self._held, []
        self._held_bytes = 0
        self._ask()
        return held

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
        after = EARLIEST_ENTRY
        if self._next.ledger_id >= 0:
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

    def _take(self, where: pb.MessageIdData, entry: bytes, before: bytes | None) -> None:
        position = Position(from_wire(where.ledger_id), from_wire(where.entry_id))
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
