"""Ids of messages, with the position vectors of ordered consumers, and their bytes.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct
from types import MappingProxyType
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from magnetar.errors import InvalidArgument
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.ids import LONG_MAX, from_wire, to_wire

__all__ = [
    "EARLIEST_ENTRY",
    "LATEST_ENTRY",
    "EntryId",
    "MessageId",
    "PositionReader",
    "Positions",
    "sort_key",
    "vector_to_bytes",
]

_I32: Final = Struct(">i")
_I64: Final = Struct(">q")
_SEGMENT_AND_SIZE: Final = Struct(">qi")


class EntryId(NamedTuple):
    """The id of a message inside its segment: the entry, and the index in its batch.

    Ids of one segment compare in the order of the segment.  The id of a chunked message is the
    entry of its last chunk; `first_chunk` is that of the first.
    """

    ledger_id: int
    entry_id: int
    batch_index: int = -1
    batch_size: int = 0
    partition: int = -1
    first_chunk: tuple[int, int] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The ids of the ledger and the entry."""
        return self.ledger_id, self.entry_id

    def __str__(self) -> str:
        """The text that the Java client prints."""
        index = f":{self.batch_index}" if self.batch_index >= 0 else ""
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}{index}"

    def to_wire(self) -> pb.MessageIdData:
        """The id in the form of commands and bytes; `batch_size` is 0 without a batch."""
        data = pb.MessageIdData(
            ledger_id=to_wire(self.ledger_id),
            entry_id=to_wire(self.entry_id),
            batch_size=self.batch_size,
        )
        if self.partition >= 0:
            data.partition = self.partition
        if self.batch_index >= 0:
            data.batch_index = self.batch_index
        if self.first_chunk is not None:
            ledger_id, entry_id = self.first_chunk
            data.first_chunk_message_id.ledger_id = to_wire(ledger_id)
            data.first_chunk_message_id.entry_id = to_wire(entry_id)
            data.first_chunk_message_id.batch_size = 0
        return data

    @classmethod
    def from_wire(cls, data: pb.MessageIdData) -> "EntryId":
        """The id in a peer's command."""
        first: tuple[int, int] | None = None
        if data.HasField("first_chunk_message_id"):
            chunk = data.first_chunk_message_id
            first = from_wire(chunk.ledger_id), from_wire(chunk.entry_id)
        return cls(
            from_wire(data.ledger_id),
            from_wire(data.entry_id),
            data.batch_index,
            data.batch_size,
            data.partition,
            first,
        )

    def to_bytes(self) -> bytes:
        """The bytes of the Java client's v4 `MessageId`."""
        return self.to_wire().SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> "EntryId":
        """The id with these bytes.  Raises `InvalidArgument`."""
        try:
            return cls.from_wire(pb.MessageIdData.FromString(data))
        except DecodeError as error:
            raise _not_an_id(f"the id inside cannot be read ({error})") from error


def sort_key(message_id: EntryId) -> tuple[int, int, int]:
    """The sort key of ids of one segment; a whole entry comes after each message of it."""
    index, size = message_id.batch_index, message_id.batch_size
    # An id without the size of its batch (0) is not taken for the last of the batch.
    whole = index < 0 or 0 < size <= index + 1
    return message_id.ledger_id, message_id.entry_id, MAX_BATCH_SIZE if whole else index


EARLIEST_ENTRY: Final = EntryId(-1, -1)
"""Before every message."""
LATEST_ENTRY: Final = EntryId(LONG_MAX, LONG_MAX)
"""After every message."""

Positions = Mapping[int, EntryId]
"""The last message of each segment, by the segment's id."""
_NO_POSITIONS: Final[Positions] = MappingProxyType({})
_NO_TOPICS: Final[Mapping[str, Positions]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MessageId:
    """The id of a message.  Two ids are equal if segment and entry are; `str()` is for logs."""

    entry: EntryId
    segment_id: int
    positions: Positions = field(default_factory=lambda: _NO_POSITIONS, compare=False)
    """The position vector of an ordered consumer, else empty: the last message of each segment that
    was handed out before this one.  Acknowledging up to this id acknowledges all of them."""
    topic: str | None = field(default=None, compare=False)
    """The topic, for consumers of several."""
    positions_of_topics: Mapping[str, Positions] = field(
        default_factory=lambda: _NO_TOPICS, compare=False
    )
    """The position vectors of all topics, for consumers of several."""

    def __str__(self) -> str:
        return f"{self.segment_id}:{self.entry}"

    def to_bytes(self) -> bytes:
        """The bytes, as those of the Java client's v5 `MessageId`.

        Big-endian: segment, length and id; number of segments, then each with its id; topic (-1:
        none); number of other topics (-1: none), then each with its vector.
        """
        parts = [_I64.pack(self.segment_id), *_sized(self.entry.to_bytes())]
        parts += _vector(self.positions)
        if self.topic is None:
            parts.append(_I32.pack(-1))
        else:
            parts += _sized(self.topic.encode())
        if self.positions_of_topics:
            parts.append(_I32.pack(len(self.positions_of_topics)))
            for topic, positions in sorted(self.positions_of_topics.items()):
                parts += _sized(topic.encode())
                parts += _vector(positions)
        else:
            parts.append(_I32.pack(-1))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> "MessageId":
        """The id with these bytes, which may end after the first id.  Raises `InvalidArgument`."""
        reader = PositionReader(data)
        segment_id = reader.number()
        entry = EntryId.from_bytes(reader.sized())
        positions = reader.positions() if reader.has_more else _NO_POSITIONS
        topic = reader.text() if reader.has_more else None
        topics: Mapping[str, Positions] = _NO_TOPICS
        if reader.has_more and (count := reader.count()) >= 0:
            topics = reader.topics(count)
        reader.finish()
        return cls(entry, segment_id, positions, topic, topics)


class PositionReader:
    """Reads the bytes of ids and checkpoints; raises `InvalidArgument` for other bytes."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def has_more(self) -> bool:
        """Whether bytes are left."""
        return self._at < len(self._data)

    def number(self) -> int:
        """The next 64-bit number."""
        return self._take(_I64)

    def count(self) -> int:
        """The next 32-bit number."""
        return self._take(_I32)

    def sized(self) -> bytes:
        """The next bytes, after their length."""
        size = self.count()
        if not 0 <= size <= len(self._data) - self._at:
            raise _not_an_id(f"a length is {size} and {len(self._data) - self._at} bytes are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def text(self) -> str | None:
        """The next text, after its length; None for the length -1."""
        at = self._at
        if self.count() < 0:
            return None
        self._at = at
        return self.topic_name()

    def topic_name(self) -> str:
        """The next text, after its length."""
        try:
            return self.sized().decode()
        except UnicodeDecodeError as error:
            raise _not_an_id("a topic name is not UTF-8") from error

    def positions(self) -> dict[int, EntryId]:
        """The next position vector, after its number of segments."""
        count = self.count()
        found: dict[int, EntryId] = {}
        for _ in range(self._plausible(count)):
            segment_id = self.number()
            found[segment_id] = EntryId.from_bytes(self.sized())
        return found

    def topics(self, count: int) -> dict[str, Positions]:
        """The next `count` position vectors, each after the name of its topic."""
        found: dict[str, Positions] = {}
        for _ in range(self._plausible(count)):
            topic = self.topic_name()
            found[topic] = self.positions()
        return found

    def finish(self) -> None:
        """Check that no bytes are left.  Raises `InvalidArgument`."""
        if self.has_more:
            raise _not_an_id(f"{len(self._data) - self._at} bytes are left over")

    def _plausible(self, count: int) -> int:
        if not 0 <= count <= len(self._data) - self._at:
            raise _not_an_id(f"{count} positions are announced")
        return count

    def _take(self, form: Struct) -> int:
        if len(self._data) - self._at < form.size:
            raise _not_an_id("it ends early")
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)


def vector_to_bytes(positions: Positions) -> bytes:
    """The bytes of a position vector in ids and checkpoints: its length, then each segment."""
    return b"".join(_vector(positions))


def _vector(positions: Positions) -> list[bytes]:
    parts = [_I32.pack(len(positions))]
    for segment_id, entry in sorted(positions.items()):
        raw = entry.to_bytes()
        parts += (_SEGMENT_AND_SIZE.pack(segment_id, len(raw)), raw)
    return parts


def _sized(data: bytes) -> tuple[bytes, bytes]:
    return _I32.pack(len(data)), data


def _not_an_id(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"These are not the bytes of a message id or a checkpoint: {why}; "
        "give the bytes unchanged as they were taken from one."
    )
