"""A fast scan of batches, written by hand for consumers of many small messages.

`scan_batch` finds the metadata and the payload of each message; the metadata is parsed when it is
used.  A batch with rarer fields, with errors, or with text that may not be UTF-8 is left to
`message.iter_batch`, so that both accept the same batches.
"""

from struct import Struct, error
from typing import Final

from magnetar.protocol.message import iter_batch

_unpack_size: Final = Struct(">I").unpack_from

_PROPERTIES: Final = 0x0A
_PARTITION_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_EVENT_TIME: Final = 0x28
_B64_ENCODED: Final = 0x30
_SEQUENCE_ID: Final = 0x40
_LONGEST_REST: Final = 8
"""Bytes after the first one of the longest varint that is read here; ten bytes are left to
`iter_batch`."""

Scanned = tuple[int, bytes, bytes]
"""The index in the batch, the metadata (`SingleMessageMetadata`) and the payload."""


def scan_batch(payload: bytes, count: int) -> list[Scanned]:
    """The messages of an uncompressed batch payload, without those that compaction removed.

    Raises `MalformedBatch` and `MalformedMetadata`, as `iter_batch` does.
    """
    found = _scan(payload, count)
    return _parse(payload, count) if found is None else found


def _parse(payload: bytes, count: int) -> list[Scanned]:
    return [
        (index, metadata.SerializeToString(), bytes(data))
        for index, (metadata, data) in enumerate(iter_batch(payload, count))
        if not metadata.compacted_out
    ]


def _scan(payload: bytes, count: int) -> list[Scanned] | None:  # noqa: PLR0911, PLR0912
    """The messages, or None if one is not of the usual kind.  One loop, for speed."""
    unpack_size = _unpack_size
    position, total = 0, len(payload)
    found: list[Scanned] = []
    add = found.append
    try:
        for index in range(count):
            (size,) = unpack_size(payload, position)
            start = at = position + 4
            end = start + size
            payload_size = -1
            while at < end:
                tag = payload[at]
                value = payload[at + 1]
                at += 2
                if tag == _PAYLOAD_SIZE:
                    if value > 0x7F:
                        more = payload[at]
                        at += 1
                        value = value & 0x7F | (more & 0x7F) << 7
                        if more > 0x7F:
                            more = payload[at]
                            at += 1
                            value |= more << 14
                            if more > 0x7F:
                                return None
                    payload_size = value
                elif tag in (_SEQUENCE_ID, _EVENT_TIME, _B64_ENCODED):
                    first = at
                    while value > 0x7F:
                        value = payload[at]
                        at += 1
                    if at - first > _LONGEST_REST:
                        return None
                elif tag == _PARTITION_KEY and value < 0x80:
                    key_start = at
                    at += value
                    if not payload[key_start:at].isascii():
                        return None
                else:
                    return None
            position = end + payload_size
            if at != end or payload_size < 0 or position > total:
                return None
            add((index, payload[start:end], payload[end:position]))
    except (IndexError, error):
        return None
    return found if position == total else None
