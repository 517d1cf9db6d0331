"""Entry bodies: the header and the digest before an entry's data, in BookKeeper's layout.  Pure.

    body    i64 ledger, i64 entry, i64 last add confirmed, i64 length, digest, data

Integers are big-endian.  The digest covers the 32 bytes of the header, then the data.  `length` is
the sum of the data bytes of the ledger up to and with this entry.  Bookies do not check digests:
trust a body only after `Digest.open`.
"""

import hashlib
import hmac
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import google_crc32c

from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.store import CorruptEntry

MASTER_KEY_BYTES = 20

_HEADER = struct.Struct(">qqqq")
_CRC32 = struct.Struct(">q")
_CRC32C = struct.Struct(">I")
_HEADER_BYTES = _HEADER.size

_crc32c: Callable[[int, bytes], int] = google_crc32c.extend


class DigestMismatch(CorruptEntry):
    """A body is not the requested entry, or is damaged."""


class OpenedEntry(NamedTuple):
    """The content of a body whose digest is right.  `length` in bytes."""

    entry_id: int
    last_add_confirmed: int
    length: int
    data: bytes


def master_key(password: bytes) -> bytes:
    """The key without which bookies neither add to a ledger nor fence it: a password's digest."""
    return hashlib.sha1(b"ledger" + password).digest()


def mac_key(password: bytes) -> bytes:
    """The key of a MAC digest."""
    return hashlib.sha1(b"mac" + password).digest()


class Digest:
    """Makes and checks the bodies of a ledger with this digest type and password."""

    __slots__ = ("_of", "digest_bytes")

    def __init__(self, digest_type: DigestType, password: bytes) -> None:
        size, of = _DIGESTS[digest_type]
        self.digest_bytes = size
        """Size of the digest in each body."""
        self._of = partial(_mac, mac_key(password)) if digest_type is DigestType.MAC else of

    @property
    def overhead_bytes(self) -> int:
        """Bytes of a body that are not data."""
        return _HEADER_BYTES + self.digest_bytes

    def seal(
        self, ledger_id: int, entry_id: int, last_add_confirmed: int, length: int, data: bytes
    ) -> Sequence[bytes]:
        """The body of an entry, in pieces: the data is not copied."""
        header = _HEADER.pack(ledger_id, entry_id, last_add_confirmed, length)
        return header + self._of(header, data), data

    def open(self, body: bytes, ledger_id: int, entry_id: int | None) -> OpenedEntry:
        """Check a body and return its content; `entry_id` None accepts any entry of the ledger.

        Raises `DigestMismatch` if the body is too short, of another entry, or damaged.
        """
        start = _HEADER_BYTES + self.digest_bytes
        if len(body) < start:
            raise DigestMismatch(
                f"An entry of ledger {ledger_id} came with {len(body)} bytes, less than the "
                f"{start} before its data: read another copy of it."
            )
        header = body[:_HEADER_BYTES]
        data = body[start:]
        if self._of(header, data) != body[_HEADER_BYTES:start]:
            raise DigestMismatch(
                f"The digest of an entry of ledger {ledger_id} is wrong: read another copy of it."
            )
        found = _HEADER.unpack(header)
        if found[0] != ledger_id or (entry_id is not None and found[1] != entry_id):
            raise DigestMismatch(
                f"Entry {found[1]} of ledger {found[0]} came instead of entry {entry_id} of "
                f"ledger {ledger_id}: read another copy of it."
            )
        return OpenedEntry(found[1], found[2], found[3], data)


def _crc32_of(header: bytes, data: bytes) -> bytes:
    return _CRC32.pack(zlib.crc32(data, zlib.crc32(header)))


def _crc32c_of(header: bytes, data: bytes) -> bytes:
    return _CRC32C.pack(_crc32c(_crc32c(0, header), data))


def _mac(key: bytes, header: bytes, data: bytes) -> bytes:
    code = hmac.new(key, header, hashlib.sha1)
    code.update(data)
    return code.digest()


def _no_digest(_header: bytes, _data: bytes) -> bytes:
    return b""


_DIGESTS: Mapping[DigestType, tuple[int, Callable[[bytes, bytes], bytes]]] = {
    DigestType.CRC32: (_CRC32.size, _crc32_of),
    DigestType.MAC: (hashlib.sha1().digest_size, partial(_mac, b"")),
    DigestType.CRC32C: (_CRC32C.size, _crc32c_of),
    DigestType.DUMMY: (0, _no_digest),
}
