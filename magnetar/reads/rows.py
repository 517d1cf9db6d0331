"""The messages of a batch by hand, as columns: one loop, for who reads many small ones.

Pure.  Rules:

- The fields that clients usually write, in the order of their numbers (key, payload size, event
  time, sequence id), are read here.  Whatever else a message has is left to the generated parser,
  that message alone.
- What does not add up is told by `protocol.message.iter_batch`, so that here and there the same
  batches are taken and refused.
- Columns are appended to whole batches at a time, so a batch that is refused leaves nothing.
"""

from collections import deque
from collections.abc import Sequence
from struct import Struct, error
from typing import Final

from protocol.frame_error import MalformedBatch
from protocol.ids import from_wire
from protocol.message import iter_batch, parse_single_metadata
from protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata

__all__ = ["Rows", "key_of", "scan_rows"]

_unpack_size: Final = Struct(">I").unpack_from
_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_EVENT_TIME: Final = 0x28
_SEQUENCE_ID: Final = 0x40
_TIME_REST: Final = 5
"""Bytes behind the first of a time since 1970, from 1971 to 2109."""
_TIME_END: Final = 2 + _TIME_REST
_LAST_SHIFT: Final = 56
"""Of the ninth byte of a varint; the tenth has rules."""


class Rows:
    """The messages of one batch, one item for each in every list."""

    __slots__ = ("event_times_ms", "indexes", "keys", "own", "sequence_ids", "values")

    def __init__(self) -> None:
        self.indexes: Sequence[int] = ()
        """In the batch."""
        self.keys: list[str | None] = []
        self.values: list[bytes | None] = []
        self.event_times_ms: list[int | None] = []
        self.sequence_ids: list[int] = []
        self.own: dict[int, SingleMessageMetadata] = {}
        """Of those that the generated parser has read, by their place in the lists."""


def scan_rows(payload: bytes, count: int, sequence_id: int) -> Rows:
    """The messages of an uncompressed batch payload, without those that compaction removed.

    `sequence_id` is that of messages without one.  Raises `MalformedBatch` and
    `MalformedMetadata`, as `iter_batch` does.
    """
    try:
        return _scan(payload, count, sequence_id)
    except (IndexError, error, UnicodeDecodeError, _Odd):
        deque(iter_batch(payload, count), maxlen=0)  # says what is wrong with it
        raise MalformedBatch(
            "A batch has messages that only one of two ways to read it takes; skip it, and look "
            "at its producer."
        ) from None


def _add_rare(rows: Rows, single: SingleMessageMetadata, payload: bytes, first_id: int) -> None:
    rows.own[len(rows.keys)] = single
    rows.keys.append(key_of(single))
    rows.values.append(None if single.null_value else payload)
    rows.event_times_ms.append(single.event_time or None)
    has_id = single.HasField("sequence_id")
    rows.sequence_ids.append(from_wire(single.sequence_id) if has_id else first_id)


def key_of(own: SingleMessageMetadata | MessageMetadata) -> str | None:
    """The key of a message, as text; base64 where it was given as bytes."""
    return own.partition_key if own.HasField("partition_key") else None


def _time_of(rest: bytes) -> int:
    """What all bytes but the first of a varint of 6 say; 0 if they are not that."""
    if len(rest) != _TIME_REST or rest[4] > 0x7F or min(rest[:4]) < 0x80:
        return 0
    time = 0
    for place, byte in enumerate(rest, 1):
        time |= (byte & 0x7F) << 7 * place
    return time


class _Odd(Exception):
    """Sizes that do not add up."""


def _scan(payload: bytes, count: int, first_id: int) -> Rows:  # noqa: PLR0912, PLR0915
    """One loop, for speed."""
    unpack_size, key_tag, time_tag = _unpack_size, _KEY, _EVENT_TIME
    rows = Rows()
    add_key, add_value = rows.keys.append, rows.values.append
    add_time, add_id = rows.event_times_ms.append, rows.sequence_ids.append
    position, rest_known, time_known = 0, b"", 0
    gone: set[int] = set()
    for index in range(count):
        (size,) = unpack_size(payload, position)
        start = at = position + 4
        end = start + size
        key = event_time = None
        sequence_id, length = first_id, -1
        if payload[at] == key_tag and payload[at + 1] < 0x80:
            key = payload[at + 2 : at + 2 + payload[at + 1]].decode()
            at += 2 + payload[at + 1]
        if payload[at] == _PAYLOAD_SIZE:
            length = payload[at + 1]
            at += 2
            if length > 0x7F:
                length += (payload[at] - 1) << 7
                at += 1 if payload[at] < 0x80 else size  # or it is too long for here
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
                    at = end + 1  # too long for here
        position = end + length
        if at == end and length >= 0:
            add_key(key)
            add_value(payload[end:position])
            add_time(event_time)
            add_id(sequence_id)
        else:
            single = parse_single_metadata(payload[start:end])
            if end > len(payload) or single.payload_size < 0:
                raise _Odd
            position = end + single.payload_size
            if single.compacted_out:
                gone.add(index)
            else:
                _add_rare(rows, single, payload[end:position], first_id)
    if position != len(payload):
        raise _Odd
    rows.indexes = [each for each in range(count) if each not in gone] if gone else range(count)
    return rows
