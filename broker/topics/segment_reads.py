"""READ_ENTRIES: stored entries of a topic, in bulk and as they are.

Rules:

- What is readable comes: up to the horizon, without aborted entries and brokers' markers.  `raw`
  brings everything, each with why it is not readable.
- An answer is bounded in bytes, what surrounds the entries included, and so is what is looked at
  for it: one that found nothing readable says how far it came.  One entry always fits.
- Reads of a connection are answered in their order, one after the other: the next is read while the
  one before is on its way, and handed over once the peer has taken that.
- SEGMENT_READS_AT_ONCE are read at the same time, and SEGMENT_READS_AHEAD answers wait for peers;
  above that a peer must have taken what it got before there is more for it.
- The entry cache is asked and never filled: these are other entries than consumers wait for.
- An entry whose ledger was trimmed while it was read is left out: whether it was aborted may be
  forgotten by then.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from broker.topics.client_connection import ClientConnection
from broker.topics.dispatch.entry_facts import marker_or_transaction
from broker.topics.range_plan import horizon_of
from broker.topics.topic import Topic
from config.bounds import (
    MAX_FRAME_SIZE,
    SEGMENT_READ_BYTES,
    SEGMENT_READ_ENTRIES,
    SEGMENT_READS_AHEAD,
    SEGMENT_READS_AT_ONCE,
)
from magnetar.protocol.hot_reads import ENTRY_OVERHEAD_BYTES, encode_read_entries
from magnetar.protocol.ids import Position, to_wire
from magnetar.protocol.pulsar_pb2 import ReadEntry
from magnetar.protocol.server_error import PeerError, ServerError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.types import Entry

_Found = tuple[int, int, bytes, int]
"""Ledger id, entry id, data, visibility."""
_READABLE = int(ReadEntry.READABLE)
_ABORTED = int(ReadEntry.ABORTED)
_OPEN = int(ReadEntry.OPEN)
_MARKER = int(ReadEntry.MARKER)


class EntryTooLarge(PeerError):
    """An entry that does not fit into any frame."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class ReadRange(NamedTuple):
    """What is asked."""

    start: Position
    end: Position
    max_bytes: int
    raw: bool


class _Piece:
    """What was found so far, and where to go on."""

    __slots__ = ("at", "at_end", "found", "room")

    def __init__(self, at: Position, room: int) -> None:
        self.at = at
        self.room = room
        self.found: list[_Found] = []
        self.at_end = False


class SegmentReads:
    """Serves READ_ENTRIES: ranges of stored entries, within a bounded memory."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[ClientConnection, asyncio.Lock] = WeakKeyDictionary()
        self._under_way = asyncio.Semaphore(SEGMENT_READS_AT_ONCE)
        self._ahead = 0

    def turn(self, connection: ClientConnection) -> asyncio.Lock:
        """Held while a read of that connection is made and handed over; given in order."""
        return self._turns.setdefault(connection, asyncio.Lock())

    async def read(
        self, connection: ClientConnection, topic: Topic, request_id: int, asked: ReadRange
    ) -> None:
        """Send one answer.  Raises `TopicUnavailable`, `EntryTooLarge`, what reading raises."""
        await self._begin(connection)
        try:
            try:
                piece = await _read(topic, asked)
                frame = _encoded(topic, request_id, piece)
            finally:
                self._under_way.release()
            entries, size_bytes = len(piece.found), sum(len(each[2]) for each in piece.found)
            del piece  # The frame has it, and may wait for long.
            await _until_writable(connection)
        finally:
            self._ahead -= 1
        connection.send_encoded(*frame)
        topic.entries_read_total += entries
        topic.bytes_read_total += size_bytes

    async def _begin(self, connection: ClientConnection) -> None:
        """Wait for a place, and for the peer if too many answers wait already.

        Decided with the place in hand: all who wait for one would see the same count before.
        """
        while True:
            await self._under_way.acquire()
            if connection.writable or self._ahead < SEGMENT_READS_AHEAD:
                self._ahead += 1
                return
            self._under_way.release()
            await _until_writable(connection)


async def _until_writable(connection: ClientConnection) -> None:
    if connection.writable:
        return
    writable = asyncio.Event()
    connection.on_writable(writable.set)
    await writable.wait()


def _encoded(topic: Topic, request_id: int, piece: _Piece) -> Sequence[bytes]:
    following = to_wire(piece.at.ledger_id), to_wire(piece.at.entry_id)
    frame = encode_read_entries(request_id, following, piece.found, at_end=piece.at_end)
    if sum(map(len, frame)) > MAX_FRAME_SIZE:
        ledger_id, entry_id, data, _ = piece.found[0]
        raise EntryTooLarge(
            f"Entry {ledger_id}:{entry_id} of {topic.name} has {len(data)} bytes and fits into no "
            "frame: read it with a consumer, or go on behind it."
        )
    return frame


async def _read(topic: Topic, asked: ReadRange) -> _Piece:
    most = min(asked.max_bytes, SEGMENT_READ_BYTES) if asked.max_bytes else SEGMENT_READ_BYTES
    piece = _Piece(asked.start, most)
    while True:
        if not await _read_on(topic, asked, piece):
            return piece
        await asyncio.sleep(0)


async def _read_on(topic: Topic, asked: ReadRange, piece: _Piece) -> bool:
    """One turn's worth; whether to go on."""
    topic.require_readable()
    ledger, at = topic.ledger, piece.at
    limit = min(asked.end, ledger.ranges.end if asked.raw else horizon_of(topic))
    if at >= limit:
        piece.at_end = True
        return False
    last = Position(limit.ledger_id, limit.entry_id - 1)
    entries = await ledger.read(
        at, max_entries=SEGMENT_READ_ENTRIES, max_bytes=max(piece.room, 0), up_to=last
    )
    first_ledger_id = ledger.ranges.first_retained.ledger_id
    horizon = horizon_of(topic)
    for entry in entries:
        size = len(entry.data) + ENTRY_OVERHEAD_BYTES
        if size > piece.room and piece.at != asked.start:
            return False
        piece.room -= size
        (ledger_id, entry_id), data = entry
        piece.at = Position(ledger_id, entry_id + 1)
        if ledger_id < first_ledger_id:
            continue
        visibility = _visibility(topic, entry, horizon)
        if visibility == _READABLE or asked.raw:
            piece.found.append((ledger_id, entry_id, data, visibility))
    if not entries:
        piece.at = limit
    return not entries or len(entries) == SEGMENT_READ_ENTRIES or piece.at >= limit


def _visibility(topic: Topic, entry: Entry, horizon: Position) -> int:
    is_marker, txn = marker_or_transaction(entry.data)
    if is_marker:
        return _MARKER
    if entry.position >= horizon:
        return _OPEN
    if txn is not None and topic.buffer.is_aborted(TxnId(*txn)):
        return _ABORTED
    return _READABLE
