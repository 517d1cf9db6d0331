"""The bookie's side of the wire, for tests: answers as bookies write them, requests read back."""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from storage.ledger.bookkeeper import bookie_protocol_pb2 as pb

_RESULT = Struct(">IIiqq")


def head(operation: int, version: int = 2) -> int:
    return version << 24 | operation << 16


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def add_reply(code: int, ledger: int, entry: int) -> bytes:
    return _RESULT.pack(24, head(1), code, ledger, entry)


def read_reply(code: int, ledger: int, entry: int, body: bytes = b"") -> bytes:
    return _RESULT.pack(24 + len(body), head(2), code, ledger, entry) + body


def batch_reply(
    code: int, ledger: int, first: int, request: int, bodies: Sequence[bytes] = ()
) -> bytes:
    start = Struct(">Iiqqq").pack(head(7), code, ledger, first, request)
    return frame(start + b"".join(frame(body) for body in bodies))


def auth_reply(plugin: str, payload: bytes) -> bytes:
    message = pb.AuthMessage(authPluginName=plugin, payload=payload).SerializeToString()
    return frame(head(3).to_bytes(4, "big") + message)


def start_tls_reply(request: int, status: int) -> bytes:
    header = pb.RequestHeader(version=3, operation=9, txnId=request)
    answer = pb.Response(header=header, status=status, startTls=pb.StartTls())
    return frame(answer.SerializeToString())


@dataclass(frozen=True)
class Asked:
    """One request as a bookie reads it."""

    operation: int
    flags: int
    ledger: int = -1
    entry: int = -1
    master_key: bytes = b""
    body: bytes = b""
    request: int = -1
    max_entries: int = 0
    max_bytes: int = 0


def parse_request(payload: bytes) -> Asked:
    """A request of version 2, without its size."""
    start = int.from_bytes(payload[:4], "big")
    assert start >> 24 == 2
    operation, flags = start >> 16 & 0xFF, start & 0xFFFF
    if operation == 1:
        ledger, entry = Struct(">qq").unpack_from(payload, 24)
        return Asked(operation, flags, ledger, entry, payload[4:24], payload[24:])
    if operation == 2:
        ledger, entry = Struct(">qq").unpack_from(payload, 4)
        return Asked(operation, flags, ledger, entry, payload[20:])
    if operation == 7:
        ledger, first, request, entries, size = Struct(">qqqiq").unpack_from(payload, 4)
        return Asked(operation, flags, ledger, first, payload[40:], b"", request, entries, size)
    return Asked(operation, flags, body=payload[4:])
