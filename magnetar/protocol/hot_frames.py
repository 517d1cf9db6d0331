"""Fast encoders of the two frames that a broker sends for each message.

The bytes are those of the protobuf encoder for the same fields (a property test compares them).
Numbers are unsigned: convert negative ones by `magnetar.protocol.ids.to_wire`.
"""

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

_SIZES: Final = Struct(">II")
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(128))
_MORE_FOLLOW: Final = tuple(bytes((value | 128,)) for value in range(128))
_MASK_64: Final = 2**64 - 1


def varint(value: int) -> bytes:
    """`value`, 0 to 2^64 - 1, as a protobuf varint."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return _MORE_FOLLOW[value & 127] + _ONE_BYTE[value >> 7]
    if value < 0x200000:
        return _MORE_FOLLOW[value & 127] + _MORE_FOLLOW[value >> 7 & 127] + _ONE_BYTE[value >> 14]
    if value < 0x10000000:
        return bytes(
            (value & 127 | 128, value >> 7 & 127 | 128, value >> 14 & 127 | 128, value >> 21)
        )
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def encode_send_receipt(
    producer_id: int, sequence_id: int, highest_sequence_id: int, ledger_id: int, entry_id: int
) -> bytes:
    """The whole SEND_RECEIPT frame; all five fields are written, zeros too."""
    message_id = b"\x08%b\x10%b" % (varint(ledger_id), varint(entry_id))
    receipt = b"\x08%b\x10%b\x1a%b%b\x20%b" % (
        varint(producer_id),
        varint(sequence_id),
        _ONE_BYTE[len(message_id)],
        message_id,
        varint(highest_sequence_id),
    )
    size = len(receipt) + 4
    return b"%b\x08\x07\x3a%b%b" % (_SIZES.pack(size + 4, size), _ONE_BYTE[size - 4], receipt)


def encode_send_receipts(
    producer_id: int, ledger_id: int, receipts: Iterable[tuple[int, int, int]]
) -> bytes:
    """SEND_RECEIPT frames of one producer for entries of one ledger, one after the other.

    `receipts` are the sequence id, highest sequence id and entry id of each.  The bytes are those
    of `encode_send_receipt`; the shared parts are encoded once.
    """
    producer, ledger = varint(producer_id), varint(ledger_id)
    heads: dict[int, bytes] = {}
    middles: dict[int, bytes] = {}
    pieces: list[bytes] = []
    for sequence_id, highest_sequence_id, entry_id in receipts:
        sequence, entry = varint(sequence_id), varint(entry_id)
        tail = b"\x20" + varint(highest_sequence_id)
        middle = middles.get(len(entry))
        if middle is None:
            size = len(ledger) + len(entry) + 2
            middle = middles[len(entry)] = b"\x1a%b\x08%b\x10" % (_ONE_BYTE[size], ledger)
        size = len(sequence) + len(middle) + len(entry) + len(tail)
        head = heads.get(size)
        if head is None:
            receipt = len(producer) + size + 2
            head = heads[size] = b"%b\x08\x07\x3a%b\x08%b\x10" % (
                _SIZES.pack(receipt + 8, receipt + 4),
                _ONE_BYTE[receipt],
                producer,
            )
        pieces += (head, sequence, middle, entry, tail)
    return b"".join(pieces)


def encode_message_head(
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    entry_size: int,
    *,
    partition: int = -1,
    redelivery_count: int = 0,
    ack_set: Sequence[int] = (),
    consumer_epoch: int | None = None,
) -> bytes:
    """The bytes before an entry of `entry_size` bytes in a MESSAGE frame.

    `partition`, `redelivery_count` and `ack_set` (signed 64-bit words) are omitted at their
    defaults, and `consumer_epoch` when None.
    """
    message_id = b"\x08%b\x10%b" % (varint(ledger_id), varint(entry_id))
    if partition != -1:
        message_id += b"\x18" + varint(partition & _MASK_64)
    message = b"\x08%b\x12%b%b" % (varint(consumer_id), _ONE_BYTE[len(message_id)], message_id)
    if redelivery_count:
        message += b"\x18" + varint(redelivery_count)
    if ack_set:
        message += b"".join([b"\x20" + varint(word & _MASK_64) for word in ack_set])
    if consumer_epoch is not None:
        message += b"\x28" + varint(consumer_epoch)
    command = b"\x08\x09\x4a%b%b" % (varint(len(message)), message)
    size = len(command)
    return _SIZES.pack(size + 4 + entry_size, size) + command
