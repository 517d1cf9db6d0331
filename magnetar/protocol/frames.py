"""Frames: the unit of the wire.  All integers are big-endian.

    simple    u32 total, u32 command size, command
    payload   u32 total, u32 command size, command, entry            (SEND and MESSAGE, only these)
    entry     [u16 0x0e01, u32 crc32c,] u32 metadata size, metadata, payload

`total` counts the bytes after it.  An entry is stored and sent as one opaque buffer that always
begins with magic and checksum; they are added to an entry without them.  The checksum is verified
on arrival.  In a MESSAGE a broker may have put `u16 0x0e02, u32 size, BrokerEntryMetadata` before
the entry; it is returned separately.
"""

import sys
from struct import Struct
from typing import Final

from magnetar.protocol.checksum import (
    BROKER_METADATA_MAGIC,
    CHECKED_FROM,
    CHECKSUM_MAGIC,
    crc32c,
    seal_entry,
)
from magnetar.protocol.commands import encode_command, parse_command
from magnetar.protocol.frame_error import (
    ChecksumMismatch,
    FrameError,
    FrameTooLarge,
    MalformedCommand,
    MalformedEntry,
    MalformedFrame,
    MissingPayload,
    ReplicatorOnly,
    UnexpectedPayload,
)
from magnetar.protocol.hot_frames import encode_message_head, encode_send_receipt
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandSend
from magnetar.protocol.received import Frame, Received, Send
from magnetar.protocol.send import TRANSACTION_BYTE, may_name_transaction, parse_send

__all__ = [
    "MAX_COMMAND_SIZE",
    "ChecksumMismatch",
    "Frame",
    "FrameDecoder",
    "FrameError",
    "FrameTooLarge",
    "MalformedCommand",
    "MalformedEntry",
    "MalformedFrame",
    "MissingPayload",
    "Received",
    "ReplicatorOnly",
    "Send",
    "UnexpectedPayload",
    "encode_command",
    "encode_message",
    "encode_message_head",
    "encode_send",
    "encode_send_receipt",
]

_U32: Final = Struct(">I")
_SIZES: Final = Struct(">II")
_ENTRY_HEAD: Final = Struct(">HII")
_unpack_entry_head: Final = _ENTRY_HEAD.unpack_from
_ENTRY_HEAD_BYTES: Final = _ENTRY_HEAD.size
_HEADER: Final = 8
"""The bytes of the two sizes at the beginning of every frame."""
MAX_COMMAND_SIZE: Final = 1024 * 1024
"""The largest command of a client.  The largest that clients send are schemas, and ACKs of
thousands of messages; parsed, an ACK of tiny ids takes some forty times its bytes."""
SMALLER_MESSAGES: Final = "send smaller messages, or raise the broker's largest message size."
"""The advice in the error for a frame that is too large."""
_SEND: Final = BaseCommand.SEND
_MESSAGE: Final = BaseCommand.MESSAGE
_MAGIC: Final = int.from_bytes(CHECKSUM_MAGIC, "big")
_LARGE_PIECE_BYTES: Final = 16 * 1024
"""Pieces of an incomplete frame that are at least as large are kept without a copy."""
_new_tuple: Final = tuple.__new__
"""Makes a NamedTuple without the call of its Python constructor."""


class FrameDecoder:
    """Decodes the bytes of one peer into frames.  After a `FrameError` each call raises it again.

    It holds at most one frame and the bytes of one call, and copies each byte a bounded number of
    times.  No memory is allocated for a length that was only announced.
    """

    __slots__ = (
        "_advice",
        "_error",
        "_held_bytes",
        "_max_command_size",
        "_max_frame_size",
        "_needed",
        "_pieces",
    )

    def __init__(
        self,
        max_frame_size: int,
        max_command_size: int = MAX_COMMAND_SIZE,
        advice: str = SMALLER_MESSAGES,
    ) -> None:
        """Refuse frames with more than `max_frame_size` bytes after the first size, and commands of
        more than `max_command_size` bytes.  `advice` ends the error for a frame that is too large.
        """
        # Commands have a limit of their own, because they become objects, which are larger.
        self._max_frame_size = max_frame_size
        self._max_command_size = max_command_size
        self._advice = advice
        self._pieces: list[bytes | bytearray] = []
        self._held_bytes = 0
        self._needed = 0
        self._error: FrameError | None = None

    @property
    def buffered_size(self) -> int:
        """The bytes of an incomplete frame."""
        return self._held_bytes

    @property
    def has_more(self) -> bool:
        """Whether the last `feed` stopped at `max_commands`: feed again, if need be nothing."""
        return self._held_bytes > 0 and not self._needed

    def set_limit(self, max_frame_size: int) -> None:
        """Refuse frames of more than `max_frame_size` bytes from now on, with the usual advice."""
        self._max_frame_size = max_frame_size
        self._advice = SMALLER_MESSAGES

    def discard(self) -> None:
        """Drop the bytes of an incomplete frame: nothing more will be fed."""
        self._pieces = []
        self._held_bytes = 0

    def feed(self, data: bytes, max_commands: int = sys.maxsize) -> list[Received]:
        """Decode bytes; returns the frames that they complete, in order.

        It stops at `max_commands`, of which SENDs do not count: they are decoded faster.

        Raises a `FrameError` for the first bad frame, with the frames before it in `frames_before`;
        every later call raises the error again, without these.
        """
        if self._error is not None:
            # A new error, as each traceback would keep the frames of the caller.
            raise type(self._error)(*self._error.args)
        if self._held_bytes:
            if self._held_bytes + len(data) < self._needed:
                self._hold(data)
                return []
            data = b"".join((*self._pieces, data))
            self.discard()
        frames: list[Received] = []
        failure: FrameError | None = None
        try:
            self._split(data, frames, max_commands)
        except FrameError as error:
            # A new error, as the traceback, which callers may keep, would keep all parsed objects.
            failure = type(error)(*error.args)
        if failure is not None:
            self._error = type(failure)(*failure.args)
            failure.frames_before = tuple(frames)
            try:
                raise failure
            finally:
                # The traceback has this frame, which must not have the error, or the bytes.
                del failure, frames, data
        return frames

    def _split(self, data: bytes, frames: list[Received], max_commands: int) -> None:
        """Append the complete frames of `data`; keep the rest, and note how much completes it."""
        position = 0
        available = len(data)
        limit = self._max_frame_size
        needed = 4
        stop_at, counted = max_commands, 0
        unpack_sizes = _SIZES.unpack_from
        while available - position >= 4:
            if len(frames) >= stop_at:
                # SENDs are counted here, many at once, as this loop is the hot path.
                stop_at += list(map(type, frames[counted:])).count(Send)
                counted = len(frames)
                if counted >= stop_at:
                    needed = 0
                    break
            if available - position >= _HEADER:
                total, command_size = unpack_sizes(data, position)
            else:
                ((total,), command_size) = _U32.unpack_from(data, position), -1
            if total > limit:
                raise FrameTooLarge(
                    f"A frame of {total} bytes is announced and {limit} is the most; {self._advice}"
                )
            if total < 4:
                raise MalformedFrame(
                    f"A frame of {total} bytes is too small for the size of its command; "
                    "check that the peer speaks the Pulsar binary protocol."
                )
            if command_size < 0:
                needed = _HEADER
                break
            if command_size > total - 4 or command_size > self._max_command_size:
                raise self._bad_command_size(command_size, total - 4)
            end = position + 4 + total
            if end > available:
                needed = 4 + total
                break
            frames.append(_decode(data, position + _HEADER, command_size, end))
            position = end
        if position < available:
            self._hold(data[position:])
            self._needed = needed

    def _hold(self, data: bytes) -> None:
        """Keep bytes of an incomplete frame."""
        self._held_bytes += len(data)
        if len(data) >= _LARGE_PIECE_BYTES:
            self._pieces.append(data)
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            # Small pieces share one, as each object is larger than a few bytes.
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def _bad_command_size(self, command_size: int, left: int) -> FrameError:
        if command_size > left:
            return MalformedFrame(
                f"A command of {command_size} bytes is announced in a frame that has "
                f"{left} left; the first size counts all bytes after itself."
            )
        return FrameTooLarge(
            f"A command of {command_size} bytes is announced and {self._max_command_size} is the "
            "most; split it, for example into several acknowledgements."
        )


def _decode(data: bytes, command_start: int, command_size: int, end: int) -> Received:
    """The frame with its command at `command_start`, which ends before `end`."""
    command_end = command_start + command_size
    known = parse_send(data, command_start, command_end)
    if known is not None:
        stored = data[command_end:end]
        left = end - command_end - _ENTRY_HEAD_BYTES
        if left >= 0:  # The checks of `_checked` without the call, for nearly every SEND.
            magic, checksum, size = _unpack_entry_head(stored)
            if magic == _MAGIC and size <= left and crc32c(stored[CHECKED_FROM:]) == checksum:
                raw = stored[_ENTRY_HEAD_BYTES : _ENTRY_HEAD_BYTES + size]
                plain = TRANSACTION_BYTE not in raw or not may_name_transaction(raw)
                return _new_tuple(Send, (*known, stored, plain, False, None, None, False))
        return _usual_send(known, _checked(_SEND, stored))
    command = parse_command(data[command_start:command_end])
    kind = command.type
    if kind == _SEND:
        return _rare_send(command.send, _checked(_SEND, data[command_end:end]))
    if kind == _MESSAGE:
        metadata, entry_start = _broker_metadata(data, command_end, end)
        entry = _checked(_MESSAGE, data[entry_start:end])
        if isinstance(entry, bytes):
            return Frame(command, entry, None, metadata)
        return Frame(command, None, entry, metadata)
    if command_end != end:
        raise UnexpectedPayload(
            f"{end - command_end} bytes follow a {BaseCommand.Type.Name(kind)} command; "
            "only SEND and MESSAGE carry a payload."
        )
    return Frame(command)


def _usual_send(known: tuple[int, int, int, int], checked: bytes | ChecksumMismatch) -> Send:
    """A SEND with fields read by hand, and an entry that has no checksum or a wrong one."""
    if isinstance(checked, bytes):
        return Send(*known, checked, plain=not _names_transaction(checked))
    return Send(*known, None, plain=False, error=checked)


def _rare_send(send: CommandSend, checked: bytes | ChecksumMismatch) -> Send:
    """A SEND from the generated parser."""
    entry: bytes | None = None
    error: ChecksumMismatch | ReplicatorOnly | None = None
    if not isinstance(checked, bytes):
        error = checked
    elif send.HasField("message_id"):
        error = _replicator_only()
    else:
        entry = checked
    in_transaction = send.HasField("txnid_least_bits") or send.HasField("txnid_most_bits")
    return Send(
        send.producer_id,
        send.sequence_id,
        send.highest_sequence_id,
        send.num_messages,
        entry,
        plain=not (
            entry is None
            or send.is_chunk
            or send.marker
            or in_transaction
            or _names_transaction(entry)
        ),
        is_chunk=send.is_chunk,
        txnid=(send.txnid_most_bits, send.txnid_least_bits) if in_transaction else None,
        error=error,
        marker=send.marker,
    )


def _replicator_only() -> ReplicatorOnly:
    return ReplicatorOnly(
        "The SEND has a message id, as replicators send to shadow topics. There are none here: "
        "send messages without it."
    )


def _names_transaction(entry: bytes) -> bool:
    """Whether the message in an entry may be part of a transaction."""
    _, _, size = _unpack_entry_head(entry)
    return may_name_transaction(entry[_ENTRY_HEAD_BYTES : _ENTRY_HEAD_BYTES + size])


def _broker_metadata(data: bytes, start: int, end: int) -> tuple[bytes | None, int]:
    """The broker entry metadata at `start`, if any, and the start of the entry."""
    if data[start : start + 2] != BROKER_METADATA_MAGIC or end - start < 6:
        return None, start
    (size,) = _U32.unpack_from(data, start + 2)
    entry_start = start + 6 + size
    if entry_start > end:
        raise MalformedEntry(
            f"Broker entry metadata of {size} bytes is announced and {end - start - 6} are left; "
            "look at what the broker stores before its entries."
        )
    return data[start + 6 : entry_start], entry_start


def _checked(kind: "BaseCommand.Type", entry: bytes) -> bytes | ChecksumMismatch:
    """The entry of a command of this type as it is stored, or the error of its checksum."""
    size = len(entry)
    if size >= _ENTRY_HEAD.size:
        magic, checksum, metadata_size = _unpack_entry_head(entry)
        if magic == _MAGIC:
            if metadata_size > size - 10:
                raise _overlong_metadata(kind, metadata_size, size - 10)
            actual = crc32c(entry[CHECKED_FROM:])
            if actual != checksum:
                return _mismatch(kind, checksum, actual)
            return entry
    return _seal_unchecked(kind, entry)


def _seal_unchecked(kind: "BaseCommand.Type", entry: bytes) -> bytes:
    """Add the checksum to an entry of a peer that sends none."""
    size = len(entry)
    if size == 0:
        raise MissingPayload(
            f"{BaseCommand.Type.Name(kind)} came without a payload; "
            "send message metadata and payload in the same frame."
        )
    if size < 4 or entry[:2] == CHECKSUM_MAGIC:
        raise MalformedEntry(
            f"The {size} bytes after {BaseCommand.Type.Name(kind)} are too few for message "
            "metadata; send its size, the metadata and the payload."
        )
    (metadata_size,) = _U32.unpack_from(entry)
    if metadata_size > size - 4:
        raise _overlong_metadata(kind, metadata_size, size - 4)
    return seal_entry(entry)


def _overlong_metadata(kind: "BaseCommand.Type", metadata_size: int, left: int) -> MalformedEntry:
    return MalformedEntry(
        f"{BaseCommand.Type.Name(kind)} announces {metadata_size} bytes of metadata and "
        f"{left} are left in its frame; the size counts the MessageMetadata alone."
    )


def _mismatch(kind: "BaseCommand.Type", announced: int, actual: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"The entry of a {BaseCommand.Type.Name(kind)} has the CRC32C {actual:08x} and "
        f"announces {announced:08x}: it was damaged on its way; send it again."
    )


def encode_message(command: BaseCommand, entry: bytes) -> tuple[bytes, bytes]:
    """The frame of a MESSAGE as (head, entry), to be written in this order without a copy."""
    body = command.SerializeToString()
    size = len(body)
    return _SIZES.pack(size + 4 + len(entry), size) + body, entry


def encode_send(command: BaseCommand, entry: bytes) -> bytes:
    """The whole frame of a SEND."""
    return b"".join(encode_message(command, entry))
