"""A fast parser of SEND.

`parse_send` reads nearly every SEND: a length of one byte, and the fields producer id, sequence id,
number of messages and highest sequence id, each of a few bytes.  For any other SEND, also a wrong
one, it returns None, and the generated parser is used.  Both return the same fields (a property
test compares them).
"""

import re
from typing import Final

_PREFIX: Final = b"\x08\x06\x32"
"""The field type = SEND, then the tag of field 6, `send`."""
_HEAD_BYTES: Final = len(_PREFIX) + 1
_LONGEST: Final = _HEAD_BYTES + 127
"""A longer command has a length of two bytes."""
_SHIFT_LIMIT: Final = 56
"""Ids of nine bytes and more, and negative numbers, are left to the generated parser."""
_INT_MAX: Final = 2**31 - 1
_PRODUCER_ID: Final = 0x08
_SEQUENCE_ID: Final = 0x10
_NUM_MESSAGES: Final = 0x18
_HIGHEST_SEQUENCE_ID: Final = 0x30
TRANSACTION_BYTE: Final = 0xB0
"""The first byte of the tag of `MessageMetadata.txnid_least_bits` (field 22, a varint)."""
# Parsers take varints that are longer than need be: B0 01, but also B0 81 00, B0 81 80 00 ...
_TRANSACTION_TAG: Final = re.compile(b"\xb0[\x01\x81]").search


def may_name_transaction(metadata: bytes) -> bool:
    """Whether a MessageMetadata may have `txnid_least_bits`.

    It is true too for other fields with the same bytes; parse the metadata then.
    """
    return _TRANSACTION_TAG(metadata) is not None


def parse_send(  # noqa: PLR0911, PLR0912 - no calls on the hot path
    data: bytes, start: int, end: int
) -> tuple[int, int, int, int] | None:
    """The producer id, sequence id, highest sequence id and number of messages in data[start:end].

    None if this is not one of the SENDs that this function reads.
    """
    if data[start : start + 3] != _PREFIX or end - start > _LONGEST:
        return None
    at = start + _HEAD_BYTES
    producer_id = sequence_id = -1
    highest_sequence_id, num_messages = 0, 1
    try:
        if data[at - 1] != end - at:
            return None
        while at < end:
            tag = data[at]
            value = data[at + 1]
            at += 2
            if value > 127:
                value &= 127
                shift = 7
                while (byte := data[at]) > 127:
                    value |= (byte & 127) << shift
                    shift += 7
                    at += 1
                    if shift > _SHIFT_LIMIT:
                        return None
                value |= byte << shift
                at += 1
            if tag == _SEQUENCE_ID:
                sequence_id = value
            elif tag == _PRODUCER_ID:
                producer_id = value
            elif tag == _NUM_MESSAGES:
                num_messages = value
            elif tag == _HIGHEST_SEQUENCE_ID:
                highest_sequence_id = value
            else:
                return None
    except IndexError:
        return None
    if at != end or producer_id < 0 or sequence_id < 0 or num_messages > _INT_MAX:
        return None
    return producer_id, sequence_id, highest_sequence_id, num_messages
