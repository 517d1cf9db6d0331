"""A fast parser of batches into columns, written by hand for many small messages.  Pure."""

from collections import deque
from collections.abc import Sequence
from struct import Struct, error
from typing import Final

from magnetar.protocol.frame_error import MalformedBatch
from magnetar.protocol.ids import from_wire
from magnetar.protocol.message import iter_batch, parse_single_metadata
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata

__all__ = ["Properties", "Rows", "key_of", "properties_of", "scan_rows"]

_unpack_size: Final = Struct(">I").unpack_from
_PROPERTY: Final = 0x0A
_NAME: Final = 0x0A
_VALUE: Final = 0x12
_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_EVENT_TIME: Final = 0x28
_SEQUENCE_ID: Final = 0x40
_TIME_REST: Final = 5
"""Bytes after the first one of a time in ms since 1970, for the years 1971 to 2109."""
_TIME_END: Final = 2 + _TIME_REST
_LAST_SHIFT: Final = 56
"""The shift of a varint's ninth byte; one with ten bytes is left to the generated parser."""


Properties = tuple[tuple[str, str], ...]
"""Names and values."""


class Rows:
    """The messages of one batch, one item for each in every list."""

    __slots__ = (
        "event_times_ms",
        "gone",
        "indexes",
        "keys",
        "own",
        "properties",
        "sequence_ids",
        "values",
    )

    def __init__(self) -> None:
        self.indexes: Sequence[int] = ()
        """The index of each message in the batch."""
        self.keys: list[str | None] = []
        self.values: list[bytes | None] = []
        self.event_times_ms: list[int | None] = []
        self.sequence_ids: list[int] = []
        self.own: dict[int, SingleMessageMetadata] = {}
        """Metadata of messages that the generated parser has read, by their place in the lists."""
        self.properties: dict[int, Properties] = {}
        """Properties of messages that have any, by their place in the lists."""
        self.gone: set[int] = set()
        """Indexes of messages that compaction removed."""

    def number(self, count: int) -> None:
        """Set the indexes, for a batch of `count` messages."""
        gone = self.gone
        self.indexes = [n for n in range(count) if n not in gone] if gone else range(count)


def scan_rows(payload: bytes, count: int, sequence_id: int) -> Rows:
    """The messages of an uncompressed batch payload, without those that compaction removed.

    `sequence_id` is that of messages without one.  Raises `MalformedBatch` and
    `MalformedMetadata`, as `iter_batch` does.
    """
    try:
        return _scan(payload, count, sequence_id)
    except (IndexError, error, UnicodeDecodeError, _SizeMismatch):
        # The general parser raises the error, so both refuse the same batches for the same reason.
        deque(iter_batch(payload, count), maxlen=0)
        raise MalformedBatch(
            "A batch is malformed for one of two parsers and not for the other; skip it, and check "
            "its producer."
        ) from None


def _add_rare(rows: Rows, payload: bytes, start: int, end: int, first_id: int, index: int) -> int:
    """Add a message by the generated parser; returns its end."""
    single = parse_single_metadata(payload[start:end])
    if end > len(payload) or single.payload_size < 0:
        raise _SizeMismatch
    position, row = end + single.payload_size, len(rows.keys)
    rows.properties.pop(row, None)
    if single.compacted_out:
        rows.gone.add(index)
        return position
    rows.own[row] = single
    if single.properties:
        rows.properties[row] = properties_of(single)
    rows.keys.append(key_of(single))
    rows.values.append(None if single.null_value else payload[end:position])
    rows.event_times_ms.append(single.event_time or None)
    has_id = single.HasField("sequence_id")
    rows.sequence_ids.append(from_wire(single.sequence_id) if has_id else first_id)
    return position


def properties_of(own: SingleMessageMetadata | MessageMetadata) -> Properties:
    """The properties of a message, each name once: the last value counts."""
    return tuple({each.key: each.value for each in own.properties}.items())


def _properties_at(payload: bytes, start: int, end: int) -> tuple[bytes, Properties]:
    """The bytes of all properties, and their names and values; none if they have a rarer form."""
    found: dict[str, str] = {}
    at = start
    while at < end and payload[at] == _PROPERTY:
        size, name_size = payload[at + 1], payload[at + 3]
        name = at + 4
        value = name + name_size + 2
        value_size = payload[value - 1]
        if (
            payload[at + 2] != _NAME
            or payload[value - 2] != _VALUE
            or max(size, name_size, value_size) > 0x7F
            or size != name_size + value_size + 4
        ):
            return b"", ()
        found[payload[name : value - 2].decode()] = payload[value : value + value_size].decode()
        at = value + value_size
    return payload[start:at], tuple(found.items())


def key_of(own: SingleMessageMetadata | MessageMetadata) -> str | None:
    """The key of a message, as text; base64 where it was given as bytes."""
    return own.partition_key if own.HasField("partition_key") else None


def _time_of(rest: bytes) -> int:
    """The number in the last five bytes of a varint of six; 0 if they are not that."""
    if len(rest) != _TIME_REST or rest[4] > 0x7F or min(rest[:4]) < 0x80:
        return 0
    time = 0
    for place, byte in enumerate(rest, 1):
        time |= (byte & 0x7F) << 7 * place
    return time


class _SizeMismatch(Exception):
    """The sizes in a batch do not add up."""


def _scan(payload: bytes, count: int, first_id: int) -> Rows:  # noqa: PLR0912, PLR0915
    # One loop for speed.  It reads the fields that clients usually write, in the order of their
    # numbers; a message with another field goes to the generated parser.
    unpack_size, key_tag, time_tag = _unpack_size, _KEY, _EVENT_TIME
    rows = Rows()
    add_key, add_value = rows.keys.append, rows.values.append
    add_time, add_id = rows.event_times_ms.append, rows.sequence_ids.append
    position, rest_known, time_known, said = 0, b"", 0, b""
    pairs: Properties = ()
    for index in range(count):
        (size,) = unpack_size(payload, position)
        start = at = position + 4
        end = start + size
        key = event_time = None
        sequence_id, length = first_id, -1
        if payload[at] == _PROPERTY:
            if not (said and payload.startswith(said, at)) or payload[at + len(said)] == _PROPERTY:
                said, pairs = _properties_at(payload, at, end)
            if said:
                rows.properties[len(rows.keys)] = pairs
                at += len(said)
        if payload[at] == key_tag and payload[at + 1] < 0x80:
            key = payload[at + 2 : at + 2 + payload[at + 1]].decode()
            at += 2 + payload[at + 1]
        if payload[at] == _PAYLOAD_SIZE:
            length = payload[at + 1]
            at += 2
            if length > 0x7F:
                length += (payload[at] - 1) << 7
                at += 1 if payload[at] < 0x80 else size  # Longer: `at` misses `end` below.
            if at < end and payload[at] == time_tag:
                rest = payload[at + 2 : at + _TIME_END]
                if rest != rest_known:
                    rest_known, time_known = rest, _time_of(rest)
                if time_known and payload[at + 1] > 0x7F:
                    event_time = time_known | payload[at + 1] & 0x7F
                    at += _TIME_END
            if at < end and payload[at] == _SEQUENCE_ID:
                sequence_id = payload[at + 1]
                at += 2
                more, shift = sequence_id, 7
                while more > 0x7F and shift <= _LAST_SHIFT:
                    more = payload[at]
                    sequence_id += (more - 1) << shift
                    shift += 7
                    at += 1
                if more > 0x7F:
                    at = end + 1  # Ten bytes: left to the generated parser.
        position = end + length
        if at == end and length >= 0:
            add_key(key)
            add_value(payload[end:position])
            add_time(event_time)
            add_id(sequence_id)
        else:
            position = _add_rare(rows, payload, start, end, first_id, index)
    if position != len(payload):
        raise _SizeMismatch
    rows.number(count)
    return rows
