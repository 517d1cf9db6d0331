"""Frames between a client and a bookie: version 2 of their protocol, and START_TLS.  Pure.

    frame        u32 size of what follows, i32 head, ...
    head         version 2 in the highest byte, operation in the next one, flags in the low 16 bits
    ADD          master key [20], entry body
    READ         i64 ledger, i64 entry, master key [20] if it fences
    BATCH_READ   i64 ledger, i64 first, i64 request, i32 entries, i64 bytes
    AUTH         AuthMessage, as is its answer
    answers      i32 code, then
      ADD        i64 ledger, i64 entry
      READ       i64 ledger, i64 entry as in the request, entry body
      BATCH_READ i64 ledger, i64 first, i64 request, (i32 size, entry body) repeated

Integers are big-endian.
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from storage.ledger.bookkeeper import bookie_protocol_pb2 as pb
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import MASTER_KEY_BYTES
from storage.ledger.store import LedgerAssertion, LedgerError

ADD: Final = 1
READ: Final = 2
AUTH: Final = 3
BATCH_READ: Final = 7

Key = tuple[int, int, int]
"""Operation, ledger, and the entry (the request's number for BATCH_READ).

Answers name no request, so this key tells which request they belong to.  It has no flags: requests
that differ only by their flags must not be in flight on the same connection.
"""
AUTH_KEY: Final[Key] = (AUTH, -1, -1)

_VERSION: Final = 2 << 24
_FENCE: Final = 1
_RECOVERY_ADD: Final = 2
_HIGH_PRIORITY: Final = 4
_ADD_HEAD: Final = _VERSION | ADD << 16
_RECOVERY_ADD_HEAD: Final = _ADD_HEAD | _RECOVERY_ADD | _HIGH_PRIORITY
_READ_HEAD: Final = _VERSION | READ << 16
_FENCING_HEAD: Final = _READ_HEAD | _FENCE | _HIGH_PRIORITY
_BATCH_HEAD: Final = _VERSION | BATCH_READ << 16
_AUTH_HEAD: Final = _VERSION | AUTH << 16

_SIZE: Final = Struct(">I")
_HEADS: Final = Struct(">II")
_READ_FRAME: Final = Struct(">IIqq")
_BATCH_FRAME: Final = Struct(">IIqqqiq")
_RESULT: Final = Struct(">iqq")
_BATCH_RESULT: Final = Struct(">iqqq")
_ADD_REPLY: Final = Struct(">IIiqq")
_unpack_add_reply: Final = _ADD_REPLY.unpack_from
_ADD_REPLY_SIZE: Final = _ADD_REPLY.size - _SIZE.size
_INT_MAX: Final = 2**31 - 1

ADD_HEAD_BYTES: Final = _HEADS.size + MASTER_KEY_BYTES
"""Size of an ADD frame before the entry body."""
READ_BYTES: Final = _READ_FRAME.size
FENCING_READ_BYTES: Final = _READ_FRAME.size + MASTER_KEY_BYTES
BATCH_READ_BYTES: Final = _BATCH_FRAME.size

_CODES: Final[Mapping[int, ReplyCode]] = {int(code): code for code in ReplyCode if code >= 0}

_START_TLS: Final = 9
_START_TLS_VERSION: Final = 3
_MAX_START_TLS_REPLY: Final = 1024


class MalformedReply(LedgerError):
    """A bookie sent bytes that are no answer.  Its connection must be closed.

    `replies_before` are the complete answers before them.
    """

    replies_before: "Sequence[Reply]" = ()


class Reply(NamedTuple):
    """One answer.  `payload` is the body of a READ, bodies of a BATCH_READ, an AuthMessage."""

    key: Key
    code: ReplyCode
    payload: Sequence[bytes]


_new_tuple: Final = tuple.__new__
"""A NamedTuple without the call of its Python constructor."""


# Requests


def encode_add_head(body_bytes: int, master_key: bytes, *, recovery: bool) -> bytes:
    """The start of an ADD frame, before an entry body of `body_bytes`."""
    if len(master_key) != MASTER_KEY_BYTES:
        raise _wrong_key(master_key)
    head = _RECOVERY_ADD_HEAD if recovery else _ADD_HEAD
    return _HEADS.pack(ADD_HEAD_BYTES - _SIZE.size + body_bytes, head) + master_key


def encode_read(ledger_id: int, entry_id: int, fence_with: bytes | None = None) -> bytes:
    """A frame that requests one entry, -1 for the one with the highest id.

    `fence_with`, a master key, fences the ledger.
    """
    if fence_with is None:
        return _READ_FRAME.pack(READ_BYTES - _SIZE.size, _READ_HEAD, ledger_id, entry_id)
    if len(fence_with) != MASTER_KEY_BYTES:
        raise _wrong_key(fence_with)
    size = FENCING_READ_BYTES - _SIZE.size
    return _READ_FRAME.pack(size, _FENCING_HEAD, ledger_id, entry_id) + fence_with


def encode_batch_read(
    ledger_id: int, first: int, request: int, max_entries: int, max_bytes: int
) -> bytes:
    """A frame that requests entries from `first` on; 0 entries: as many as fit."""
    size = BATCH_READ_BYTES - _SIZE.size
    entries = min(max_entries, _INT_MAX)
    return _BATCH_FRAME.pack(size, _BATCH_HEAD, ledger_id, first, request, entries, max_bytes)


def encode_auth(plugin: str, payload: bytes) -> bytes:
    """A frame with a message of authentication."""
    message = pb.AuthMessage(authPluginName=plugin, payload=payload).SerializeToString()
    return _HEADS.pack(_SIZE.size + len(message), _AUTH_HEAD) + message


def decode_auth(payload: bytes) -> tuple[str, bytes]:
    """Plugin and payload of an AUTH answer.  Raises `MalformedReply`."""
    message = pb.AuthMessage()
    try:
        message.ParseFromString(payload)
    except DecodeError as found:
        raise _malformed("an AuthMessage that cannot be read") from found
    return message.authPluginName, message.payload


def encode_start_tls(request: int) -> bytes:
    """A START_TLS frame (version 3): after its answer both sides begin the handshake of TLS.

    A bookie takes it only before any frame of version 2.
    """
    header = pb.RequestHeader(version=_START_TLS_VERSION, operation=_START_TLS, txnId=request)
    message = pb.Request(header=header, startTls=pb.StartTls()).SerializeToString()
    return _SIZE.pack(len(message)) + message


def start_tls_status(received: bytes, request: int) -> int | None:
    """The status in the answer to START_TLS, 0 for success; None while it is not complete.

    Raises `MalformedReply` for any other bytes, and for bytes after the answer.
    """
    if len(received) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack_from(received)
    if size > _MAX_START_TLS_REPLY:
        raise _malformed(f"{size} bytes in answer to START_TLS")
    if len(received) < _SIZE.size + size:
        return None
    if len(received) > _SIZE.size + size:
        # Sent before the handshake, these would pass for protected bytes.
        raise _malformed("bytes after the answer to START_TLS and before TLS")
    message = pb.Response()
    try:
        message.ParseFromString(received[_SIZE.size :])
    except DecodeError as found:
        raise _malformed("an answer to START_TLS that cannot be read") from found
    if not message.IsInitialized() or message.header.txnId != request:
        raise _malformed("an answer to something else than START_TLS")
    return message.status


# Answers


class ReplyDecoder:
    """Decodes the bytes of one bookie into answers.  After a `MalformedReply` it stays broken."""

    __slots__ = ("_broken", "_buffer", "_max_frame_bytes", "_needed")

    def __init__(self, max_frame_bytes: int) -> None:
        """Refuse frames of more than `max_frame_bytes` with their size field."""
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._needed = 0
        self._broken = False

    def feed(self, data: bytes) -> Sequence[Reply]:
        """The answers that `data` completes, in order.

        Raises `MalformedReply`, with the answers before; later calls raise it without any.
        """
        if self._broken:
            raise _malformed("more after what could not be read")
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return ()
            data = bytes(self._buffer)
            self._buffer = bytearray()
        replies: list[Reply] = []
        try:
            self._decode(data, replies)
        except MalformedReply as found:
            self._broken = True
            found.replies_before = replies
            raise
        return replies

    def _decode(self, data: bytes, replies: list[Reply]) -> None:
        total = len(data)
        start = 0
        self._needed = _SIZE.size
        while total - start >= _SIZE.size:
            if total - start >= _ADD_REPLY.size:
                size, head, code, ledger_id, entry_id = _unpack_add_reply(data, start)
                if head == _ADD_HEAD and size == _ADD_REPLY_SIZE:
                    known = _CODES.get(code, ReplyCode.OTHER)
                    reply = _new_tuple(Reply, ((ADD, ledger_id, entry_id), known, ()))
                    replies.append(reply)
                    start += _ADD_REPLY.size
                    continue
            else:
                (size,) = _SIZE.unpack_from(data, start)
            # Before anything is buffered for a frame of that size.
            if not _SIZE.size <= size <= self._max_frame_bytes - _SIZE.size:
                raise _malformed(f"a frame of {size} bytes")
            end = start + _SIZE.size + size
            if end > total:
                self._needed = end - start
                break
            replies.append(_reply(data, start + _SIZE.size, end))
            start = end
        if start < total:
            self._buffer += memoryview(data)[start:]


def _reply(data: bytes, start: int, end: int) -> Reply:
    """The answer from `start`, after its size, to `end`."""
    (head,) = _SIZE.unpack_from(data, start)
    start += _SIZE.size
    operation = head >> 16 ^ _VERSION >> 16
    if operation in (ADD, READ):
        body = start + _RESULT.size
        if body > end or (operation == ADD and body < end):
            raise _malformed(f"{end - start} bytes in answer to operation {operation}")
        code, ledger_id, entry_id = _RESULT.unpack_from(data, start)
        payload = () if operation == ADD else (data[body:end],)
        known = _CODES.get(code, ReplyCode.OTHER)
        return _new_tuple(Reply, ((operation, ledger_id, entry_id), known, payload))
    if operation == BATCH_READ:
        body = start + _BATCH_RESULT.size
        if body > end:
            raise _malformed(f"{end - start} bytes in answer to a batch read")
        code, ledger_id, _, request = _BATCH_RESULT.unpack_from(data, start)
        known = _CODES.get(code, ReplyCode.OTHER)
        return Reply((operation, ledger_id, request), known, _bodies(data, body, end))
    if operation == AUTH:
        return Reply(AUTH_KEY, ReplyCode.OK, (data[start:end],))
    raise _malformed(f"an answer that begins with {head:08x}")


def _bodies(data: bytes, start: int, end: int) -> Sequence[bytes]:
    bodies = []
    while start < end:
        body = start + _SIZE.size
        if body > end:
            raise _malformed("a batch with half a size in it")
        (size,) = _SIZE.unpack_from(data, start)
        start = body + size
        if start > end:
            raise _malformed(f"an entry of {size} bytes that goes beyond its batch")
        bodies.append(data[body:start])
    return bodies


def _malformed(what: str) -> MalformedReply:
    return MalformedReply(f"A bookie sent {what}: check whether a bookie listens at that address.")


def _wrong_key(master_key: bytes) -> LedgerAssertion:
    return LedgerAssertion(
        f"A master key has {len(master_key)} bytes instead of {MASTER_KEY_BYTES}: report it."
    )
