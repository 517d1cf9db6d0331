"""READ_ENTRIES: send the stored entries of a topic to bulk readers, as they are."""

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
    """The entry is larger than the largest frame."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class ReadRange(NamedTuple):
    """A decoded READ_ENTRIES: entries from `start` up to, but not including, `end`.

    Readable are entries up to the max read position, except those of aborted transactions and
    brokers' markers.  With `raw` all entries are sent, each with its visibility.  `max_bytes` 0 is
    the broker's own bound.
    """

    start: Position
    end: Position
    max_bytes: int
    raw: bool


class _Answer:
    """The entries of one answer, and the position where the next one goes on."""

    __slots__ = ("at", "at_end", "bytes_left", "found")

    def __init__(self, at: Position, bytes_left: int) -> None:
        self.at = at
        self.bytes_left = bytes_left
        self.found: list[_Found] = []
        self.at_end = False


class SegmentReads:
    """Serves READ_ENTRIES: ranges of stored entries, within a bounded memory.

    SEGMENT_READS_AT_ONCE are read at the same time, and SEGMENT_READS_AHEAD answers wait for peers.
    Above that a peer must have taken its last answer before the next one is read.
    """

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[ClientConnection, asyncio.Lock] = WeakKeyDictionary()
        self._under_way = asyncio.Semaphore(SEGMENT_READS_AT_ONCE)
        self._ahead = 0

    def turn(self, connection: ClientConnection) -> asyncio.Lock:
        """The lock of a connection's reads, which serves them in the order of their arrival."""
        return self._turns.setdefault(connection, asyncio.Lock())

    async def read(
        self, connection: ClientConnection, topic: Topic, request_id: int, asked: ReadRange
    ) -> None:
        """Send one answer.

        Raises `TopicUnavailable`, `EntryTooLarge`, and the errors of reading.
        """
        await self._begin(connection)
        try:
            try:
                answer = await _read(topic, asked)
                frame = _encode(topic, request_id, answer)
            finally:
                self._under_way.release()
            entries, size_bytes = len(answer.found), sum(len(each[2]) for each in answer.found)
            del answer  # The frame has the entries, and may wait for long.
            # This answer is read while the one before is on its way, and sent when that is taken.
            await _until_writable(connection)
        finally:
            self._ahead -= 1
        connection.send_encoded(*frame)
        topic.entries_read_total += entries
        topic.bytes_read_total += size_bytes

    async def _begin(self, connection: ClientConnection) -> None:
        """Wait for a free read, and for the peer if too many answers wait already."""
        while True:
            await self._under_way.acquire()
            # Decided after the wait: all that wait would see the same count before it.
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


def _encode(topic: Topic, request_id: int, answer: _Answer) -> Sequence[bytes]:
    following = to_wire(answer.at.ledger_id), to_wire(answer.at.entry_id)
    frame = encode_read_entries(request_id, following, answer.found, at_end=answer.at_end)
    if sum(map(len, frame)) > MAX_FRAME_SIZE:
        ledger_id, entry_id, data, _ = answer.found[0]
        raise EntryTooLarge(
            f"Entry {ledger_id}:{entry_id} of {topic.name} has {len(data)} bytes and fits into no "
            "frame: read it with a consumer, or go on behind it."
        )
    return frame


async def _read(topic: Topic, asked: ReadRange) -> _Answer:
    """Read one answer.  It may have no entry; then `at` says how far the read came."""
    most = min(asked.max_bytes, SEGMENT_READ_BYTES) if asked.max_bytes else SEGMENT_READ_BYTES
    answer = _Answer(asked.start, most)
    while True:
        if not await _read_on(topic, asked, answer):
            return answer
        await asyncio.sleep(0)


async def _read_on(topic: Topic, asked: ReadRange, answer: _Answer) -> bool:
    """Read as much as fits one turn of the loop; returns whether there is more to read."""
    topic.require_readable()
    ledger, at = topic.ledger, answer.at
    limit = min(asked.end, ledger.ranges.end if asked.raw else horizon_of(topic))
    if at >= limit:
        answer.at_end = True
        return False
    last = Position(limit.ledger_id, limit.entry_id - 1)
    # The entry cache is read and never filled: consumers wait for other entries.
    entries = await ledger.read(
        at, max_entries=SEGMENT_READ_ENTRIES, max_bytes=max(answer.bytes_left, 0), up_to=last
    )
    first_ledger_id = ledger.ranges.first_retained.ledger_id
    horizon = horizon_of(topic)
    for entry in entries:
        # Entries that are not sent count too: this bounds what is read.  One entry always fits.
        size = len(entry.data) + ENTRY_OVERHEAD_BYTES
        if size > answer.bytes_left and answer.at != asked.start:
            return False
        answer.bytes_left -= size
        (ledger_id, entry_id), data = entry
        answer.at = Position(ledger_id, entry_id + 1)
        # Trimmed while it was read: whether the entry was aborted may be forgotten by now.
        if ledger_id < first_ledger_id:
            continue
        visibility = _visibility(topic, entry, horizon)
        if visibility == _READABLE or asked.raw:
            answer.found.append((ledger_id, entry_id, data, visibility))
    if not entries:
        answer.at = limit
    return not entries or len(entries) == SEGMENT_READ_ENTRIES or answer.at >= limit


def _visibility(topic: Topic, entry: Entry, horizon: Position) -> int:
    is_marker, txn = marker_or_transaction(entry.data)
    if is_marker:
        return _MARKER
    if entry.position >= horizon:
        return _OPEN
    if txn is not None and topic.buffer.is_aborted(TxnId(*txn)):
        return _ABORTED
    return _READABLE
