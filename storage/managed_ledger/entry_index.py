"""Pure: sums of messages and bytes of one ledger's entries, so that ranges need not be read."""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct, error, pack, unpack
from typing import Final, NamedTuple, cast

from google.protobuf.message import DecodeError

from config.bounds import ENTRY_INDEX_BLOCKS
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.pulsar_pb2 import MessageMetadata

ROOT: Final = "/entry-index"
_IDS_OF_DIRECTORY: Final = 1000
_VERSION: Final = 1
_HEAD: Final = Struct(">BQQ")
_NO_TIME: Final = 2**64 - 1
_U32: Final = Struct(">I").unpack_from
_TIME: Final = b"\x18"
_BATCH: Final = b"\x58"
_MARKER: Final = b"\xa0"
"""First bytes of fields of MessageMetadata: publish time, number of messages, marker type."""
_PARSE: Final = cast("Callable[[bytes], MessageMetadata]", MessageMetadata.FromString)


class EntryFacts(NamedTuple):
    """Messages, size and publish time of one entry; time 0 is no time.

    A batch has as many messages as its metadata says, a broker's marker none.  An entry whose
    metadata cannot be parsed, or gives an impossible number, is one message.
    """

    messages: int
    size_bytes: int
    publish_time_ms: int


@dataclass(slots=True)
class Sums:
    """Sums over some entries, those of aborted transactions included.

    Publish times are None if no entry has one.
    """

    entries: int = 0
    messages: int = 0
    size_bytes: int = 0
    least_ms: int | None = None
    greatest_ms: int | None = None

    def add(self, other: "Sums") -> None:
        """Add the sums of other entries."""
        self.entries += other.entries
        self.messages += other.messages
        self.size_bytes += other.size_bytes
        self._widen(other.least_ms, other.greatest_ms)

    def add_entry(self, fact: EntryFacts) -> None:
        """Count one more entry."""
        self.entries += 1
        self.messages += fact.messages
        self.size_bytes += fact.size_bytes
        if fact.publish_time_ms:
            self._widen(fact.publish_time_ms, fact.publish_time_ms)

    def _widen(self, least_ms: int | None, greatest_ms: int | None) -> None:
        if least_ms is not None and (self.least_ms is None or least_ms < self.least_ms):
            self.least_ms = least_ms
        if greatest_ms is not None and (self.greatest_ms is None or greatest_ms > self.greatest_ms):
            self.greatest_ms = greatest_ms


class BrokenIndex(ValueError):
    """The stored bytes are no index: build the index again."""


def index_key(ledger_id: int) -> str:
    """The key of the record of a ledger's index."""
    return f"{ROOT}/{ledger_id // _IDS_OF_DIRECTORY}/{ledger_id}"


def facts_of(data: bytes) -> EntryFacts:
    """Parse the metadata of an entry."""
    try:
        metadata = _PARSE(data[10 : 10 + int.from_bytes(data[6:10], "big")])
    except DecodeError:
        return EntryFacts(1, len(data), 0)
    count = metadata.num_messages_in_batch
    if not 0 < count <= MAX_BATCH_SIZE:
        count = 1
    return EntryFacts(0 if metadata.marker_type else count, len(data), metadata.publish_time)


def _time_at(data: bytes) -> int:
    """Offset of the publish time, if it has six bytes (as from 2004 to 3000) and follows the
    producer's name and the sequence id; else 0.
    """
    try:
        at = data[11] + 12
        if data[10] != 0x0A or data[at] != 0x10 or data[11] > 127:
            return 0
        at += 1
        while data[at] > 127:
            at += 1
        going_on = data[at + 2] & data[at + 3] & data[at + 4] & data[at + 5] & data[at + 6]
        if data[at + 1] == 0x18 and data[at + 7] < 128 <= going_on:
            return at + 2
    except IndexError:
        pass
    return 0


def _decoded(six_bytes: bytes) -> int:
    """A varint of six bytes."""
    a, b, c, d, e, f = six_bytes
    return a & 127 | (b & 127) << 7 | (c & 127) << 14 | (d & 127) << 21 | (e & 127) << 28 | f << 35


class LedgerIndex:
    """Sums of the messages and bytes of one ledger's entries, from entry 0 on, by blocks.

    A block has `stride` entries.  The index has the messages and bytes before each block, and the
    least and the greatest publish time in it.  At ENTRY_INDEX_BLOCKS blocks the stride doubles, so
    the index is bounded however long its ledger is.  Sums within a block are not known here:
    `stream_ranges` reads its entries.
    """

    __slots__ = (
        "_block_left",
        "_bytes",
        "_greatest",
        "_least",
        "_messages",
        "_tail",
        "_tail_messages",
        "_time",
        "entries",
        "messages",
        "size_bytes",
        "stride",
    )

    def __init__(self) -> None:
        self.stride = 1
        self.entries = 0
        self.messages = 0
        self.size_bytes = 0
        self._block_left = 0
        """Number of entries that the newest block still takes."""
        self._tail = b""
        """Metadata after the publish time of an entry that was parsed."""
        self._tail_messages = 1
        """Number of messages of an entry with that metadata."""
        self._time = b""
        """The last publish time noted in the newest block, as bytes of the metadata."""
        self._messages = array("Q")
        self._bytes = array("Q")
        self._least = array("Q")
        self._greatest = array("Q")

    @property
    def block_count(self) -> int:
        """Number of blocks; the newest one may not be full."""
        return len(self._messages)

    def add(self, entries: Iterable[bytes]) -> None:
        """Count the next entries."""
        # This is on the publish path of every message, so usual metadata are not parsed: name,
        # sequence id and publish time, then the same bytes as in an entry parsed before, or bytes
        # in which no field that matters can begin.
        block_left, count = self._block_left, self.entries
        messages, size_bytes = self.messages, self.size_bytes
        tail, tail_messages, time = self._tail, self._tail_messages, self._time
        for data in entries:
            if not block_left:
                self._open_block(messages, size_bytes)
                block_left, time = self.stride, b""
            block_left -= 1
            count += 1
            size_bytes += len(data)
            at = _time_at(data)
            end = at + 6
            following = data[end : _U32(data, 6)[0] + 10] if at else b""
            if at and following == tail:
                messages += tail_messages
            elif at and not (_BATCH in following or _MARKER in following or _TIME in following):
                messages += 1
            else:
                facts = facts_of(data)
                self._note_time(facts.publish_time_ms)
                messages += facts.messages
                time = b""
                if at:
                    tail, tail_messages = following, facts.messages
                continue
            if data[at:end] != time:
                time = data[at:end]
                self._note_time(_decoded(time))
        self._block_left, self.entries = block_left, count
        self.messages, self.size_bytes = messages, size_bytes
        self._tail, self._tail_messages, self._time = tail, tail_messages, time

    def _note_time(self, time_ms: int) -> None:
        """Note the publish time of an entry of the newest block."""
        # Producers set publish times, which need not rise.  So blocks have the greatest one too:
        # it tells whether any entry of a block was published at a given time or later.
        if time_ms:
            self._greatest[-1] = max(self._greatest[-1], time_ms)
            self._least[-1] = min(self._least[-1], time_ms)

    def _open_block(self, messages: int, size_bytes: int) -> None:
        if len(self._messages) == ENTRY_INDEX_BLOCKS:
            self._double()
        self._messages.append(messages)
        self._bytes.append(size_bytes)
        self._least.append(_NO_TIME)
        self._greatest.append(0)

    def _double(self) -> None:
        """Merge each two blocks into one; all are full."""
        self.stride *= 2
        self._messages = self._messages[::2]
        self._bytes = self._bytes[::2]
        self._least = array("Q", map(min, self._least[::2], self._least[1::2]))
        self._greatest = array("Q", map(max, self._greatest[::2], self._greatest[1::2]))

    # Queries

    def blocks_at(self, at: int, end: int) -> tuple[int, int]:
        """The blocks that begin at entry `at` and end at or before `end`, as a half-open range.

        If that entry is within a block, the range is empty, and both ends are that block.
        """
        low = at // self.stride
        if low * self.stride != at:
            return low, low
        high = self.block_count if end >= self.entries else end // self.stride
        return low, max(low, high)

    def entries_of(self, block: int) -> tuple[int, int]:
        """The entries of a block, as a half-open range."""
        return block * self.stride, min((block + 1) * self.stride, self.entries)

    def sums(self, low: int, high: int) -> Sums:
        """Sums over the blocks low..high-1."""
        if low >= high:
            return Sums()
        least, greatest = min(self._least[low:high]), max(self._greatest[low:high])
        return Sums(
            self.entries_of(high - 1)[1] - low * self.stride,
            self._messages_before(high) - self._messages[low],
            self._bytes_before(high) - self._bytes[low],
            None if least == _NO_TIME else least,
            greatest or None,
        )

    def fitting(self, low: int, high: int, max_messages: int, max_bytes: int) -> int:
        """The greatest end up to `high` such that blocks low..end-1 are within both bounds."""
        by_messages = self._fitting(self._messages, self.messages, low, high, max_messages)
        return min(by_messages, self._fitting(self._bytes, self.size_bytes, low, high, max_bytes))

    def _fitting(self, before: "array[int]", total: int, low: int, high: int, most: int) -> int:
        if low >= high:
            return low
        limit = before[low] + most
        if high == len(before) and total <= limit:
            return high
        end = bisect_right(before, limit, low, min(high + 1, len(before))) - 1
        return max(end, low)

    def first_block_of(self, low: int, high: int, since_ms: int) -> int | None:
        """The first of the blocks low..high-1 with an entry of that publish time or later."""
        for block in range(low, high):
            if self._greatest[block] >= since_ms:
                return block
        return None

    def _messages_before(self, block: int) -> int:
        return self._messages[block] if block < len(self._messages) else self.messages

    def _bytes_before(self, block: int) -> int:
        return self._bytes[block] if block < len(self._bytes) else self.size_bytes

    # Storing

    def encode(self) -> bytes:
        """The value of a record: version, stride, number of entries, and compressed columns."""
        columns = (
            *_steps(self._messages, self.messages),
            *_steps(self._bytes, self.size_bytes),
            *self._least,
            *self._greatest,
        )
        packed = zlib.compress(pack(f">{len(columns)}Q", *columns), 6)
        return _HEAD.pack(_VERSION, self.stride, self.entries) + packed

    @classmethod
    def decode(cls, value: bytes) -> "LedgerIndex":
        """Decode the value that `encode` made.  Raises `BrokenIndex`, also for other versions."""
        try:
            version, stride, entries = _HEAD.unpack_from(value)
            if version != _VERSION or not stride or entries > stride * ENTRY_INDEX_BLOCKS:
                raise BrokenIndex(f"version {version}, {entries} entries by {stride}")
            blocks = -(-entries // stride)
            columns = unpack(f">{4 * blocks}Q", zlib.decompress(value[_HEAD.size :]))
        except (error, zlib.error) as broken:
            raise BrokenIndex(str(broken)) from broken
        index = cls()
        index.stride, index.entries = stride, entries
        index._block_left = blocks * stride - entries
        index._messages, index.messages = _before(columns[:blocks])
        index._bytes, index.size_bytes = _before(columns[blocks : 2 * blocks])
        index._least = array("Q", columns[2 * blocks : 3 * blocks])
        index._greatest = array("Q", columns[3 * blocks :])
        return index


class RecentIndexes:
    """The most recently used indexes of ended ledgers in memory, at most `limit`."""

    __slots__ = ("_indexes", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._indexes: dict[int, LedgerIndex] = {}

    def get(self, ledger_id: int) -> LedgerIndex | None:
        """The index of a ledger, or None."""
        index = self._indexes.pop(ledger_id, None)
        if index is not None:
            self._indexes[ledger_id] = index
        return index

    def keep(self, ledger_id: int, index: LedgerIndex) -> None:
        """Add the index of a ledger; above the limit the least recently used one goes."""
        self._indexes.pop(ledger_id, None)
        self._indexes[ledger_id] = index
        if len(self._indexes) > self._limit:
            del self._indexes[next(iter(self._indexes))]

    def drop(self, ledger_id: int) -> None:
        """Remove the index of a ledger."""
        self._indexes.pop(ledger_id, None)


def _steps(before: Sequence[int], total: int) -> Iterable[int]:
    """The count in each block, from the sums before each: small numbers compress better."""
    return (end - start for start, end in zip(before, (*before, total)[1:], strict=True))


def _before(steps: Sequence[int]) -> "tuple[array[int], int]":
    before, total = array("Q"), 0
    for step in steps:
        before.append(total)
        total += step
    return before, total
