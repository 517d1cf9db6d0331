"""A fast encoder of READ_ENTRIES_RESPONSE, which does not copy large entries.

The bytes are those of the protobuf encoder for the same fields (a property test compares them).
Numbers are unsigned, as in `hot_frames`.
"""

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

from magnetar.protocol.hot_frames import varint

_SIZES: Final = Struct(">II")
_KIND: Final = b"\x08\xf7\x07"
"""BaseCommand.type = READ_ENTRIES_RESPONSE."""
_BODY: Final = b"\xba\x3f"
"""The tag of BaseCommand.read_entries_response; its length follows."""
_TAILS: Final = (b"", b"\x20\x01", b"\x20\x02", b"\x20\x03")
"""The bytes of ReadEntry.visibility; READABLE is omitted."""
ENTRY_OVERHEAD_BYTES: Final = 40
"""The most bytes that an entry takes beside its data."""
JOINED_BELOW_BYTES: Final = 16 * 1024
"""Smaller entries are copied into one buffer: a buffer for each would cost more."""


def encode_read_entries(
    request_id: int,
    following: tuple[int, int],
    entries: Iterable[tuple[int, int, bytes, int]],
    *,
    at_end: bool,
) -> Sequence[bytes]:
    """The frame, as buffers to be sent one after the other.

    `following` is the position to go on from; `entries` have ledger id, entry id, data and
    visibility.
    """
    message_id = b"\x08%b\x10%b" % (varint(following[0]), varint(following[1]))
    pieces: list[bytes] = [
        b"\x08%b\x22%b%b" % (varint(request_id), varint(len(message_id)), message_id)
    ]
    size = len(pieces[0])
    buffers: list[bytes] = []
    for ledger_id, entry_id, data, visibility in entries:
        tail = _TAILS[visibility]
        inner = b"\x08%b\x10%b\x1a%b" % (varint(ledger_id), varint(entry_id), varint(len(data)))
        within = len(inner) + len(data) + len(tail)
        head = b"\x2a%b%b" % (varint(within), inner)
        size += len(head) + len(data) + len(tail)
        if len(data) < JOINED_BELOW_BYTES:
            pieces += (head, data, tail)
        else:
            pieces.append(head)
            buffers.append(b"".join(pieces))
            buffers.append(data)
            pieces = [tail] if tail else []
    if at_end:
        pieces.append(b"\x30\x01")
        size += 2
    if pieces:
        buffers.append(b"".join(pieces))
    command = b"%b%b%b" % (_KIND, _BODY, varint(size))
    total = len(command) + size
    buffers[0] = _SIZES.pack(total + 4, total) + command + buffers[0]
    return buffers
