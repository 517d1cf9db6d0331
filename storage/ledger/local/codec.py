"""The bytes of a log file: header, groups, records.  Pure.

A log file is a file header followed by groups.  A group is a group header and the records that one
write and one sync made durable.  All integers are little-endian.

One group is written at a time, and the next one only after the sync of the one before it.  So a
valid group header proves that all bytes before it in its file were durable.  Recovery builds on
that (`scan`).
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

LOG_MAGIC = b"MGLEDLOG"
LOG_VERSION = 1
GROUP_MAGIC = b"MGRP"

_FILE = struct.Struct("<8sIIQQQQ")
_GROUP = struct.Struct("<4sQIII")
_RECORD = struct.Struct("<qqII")
_RECORD_AND_CRC = struct.Struct("<qqIII")
_CRC = struct.Struct("<I")

FILE_HEADER_BYTES = _FILE.size + _CRC.size
GROUP_HEADER_BYTES = _GROUP.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD.size + _CRC.size
MAX_LOG_BYTES = 2**32 - 1
"""Offsets inside a log file are 32 bit."""

FLAG_COMPACTED = 1
"""The file was made by compaction, whole and durable before it got its name."""

Mapped = bytes | mmap.mmap
"""A file's content, with slices and `find`."""

crc32c = google_crc32c.value
extend_crc32c = google_crc32c.extend


class LogFormatError(ValueError):
    """Bytes with a wrong magic, version, length or checksum."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a log file.

    `previous` is the file written before it (0 for the first file and for compacted ones), and
    `previous_end` the length in bytes up to which that one was durable.
    """

    number: int
    nonce: int
    flags: int = 0
    previous: int = 0
    previous_end: int = 0

    @property
    def seed(self) -> int:
        """The start value of the record header checksums of this file."""
        return record_seed(self.nonce)


class GroupHeader(NamedTuple):
    """Decoded group header: bytes and number of the records that follow."""

    body_bytes: int
    records: int


class RecordHeader(NamedTuple):
    """Decoded record header: ledger, entry, size and checksum of the payload."""

    ledger_id: int
    entry_id: int
    size: int
    payload_crc: int


def record_seed(nonce: int) -> int:
    """The start value of record header checksums in the file with this nonce."""
    # With the nonce in it, records of another file, or of an older one in the same disk blocks,
    # never verify in this file.
    return int(crc32c(nonce.to_bytes(8, "little")))


def encode_file_header(header: FileHeader) -> bytes:
    """Encode the header of a log file into `FILE_HEADER_BYTES` bytes."""
    body = _FILE.pack(
        LOG_MAGIC,
        LOG_VERSION,
        header.flags,
        header.number,
        header.nonce,
        header.previous,
        header.previous_end,
    )
    return body + _CRC.pack(crc32c(body))


def decode_file_header(data: bytes) -> FileHeader:
    """The header at the start of `data`.  Raises `LogFormatError`."""
    if len(data) < FILE_HEADER_BYTES:
        raise LogFormatError("the file is shorter than a log file header")
    body = data[: _FILE.size]
    magic, version, flags, number, nonce, previous, previous_end = _FILE.unpack(body)
    if magic != LOG_MAGIC:
        raise LogFormatError("the file does not begin as a ledger log does")
    if _CRC.unpack_from(data, _FILE.size)[0] != crc32c(body):
        raise LogFormatError("the checksum of the log file header is wrong")
    if version != LOG_VERSION:
        raise LogFormatError(f"log file version {version} is not {LOG_VERSION}")
    return FileHeader(number, nonce, flags, previous, previous_end)


def encode_group_header(nonce: int, offset: int, body_bytes: int, records: int) -> bytes:
    """Encode the header of a group at `offset` of the file with this nonce."""
    # Offset and nonce tell it from a group of another file, and from one inside a payload.
    body = _GROUP.pack(GROUP_MAGIC, nonce, offset, body_bytes, records)
    return body + _CRC.pack(crc32c(body))


def decode_group_header(data: bytes, nonce: int, offset: int) -> GroupHeader | None:
    """The group header at the start of `data`; None if it is none of this file and offset."""
    if len(data) < GROUP_HEADER_BYTES:
        return None
    body = data[: _GROUP.size]
    magic, its_nonce, its_offset, body_bytes, records = _GROUP.unpack(body)
    if magic != GROUP_MAGIC or its_nonce != nonce or its_offset != offset:
        return None
    if _CRC.unpack_from(data, _GROUP.size)[0] != crc32c(body):
        return None
    return GroupHeader(body_bytes, records)


def encode_record_header(
    seed: int, ledger_id: int, entry_id: int, size: int, payload_crc: int
) -> bytes:
    """Encode the header of one record; `payload_crc` is `crc32c(entry)`."""
    # Header and payload have a checksum each: with a damaged payload it is still known which entry
    # it was, and where the next record begins.
    body = _RECORD.pack(ledger_id, entry_id, size, payload_crc)
    return body + _CRC.pack(extend_crc32c(seed, body))


def decode_record_header(data: bytes, seed: int) -> RecordHeader | None:
    """The record header at the start of `data`; None if its checksum is wrong."""
    if len(data) < RECORD_HEADER_BYTES:
        return None
    body = data[: _RECORD.size]
    if _CRC.unpack_from(data, _RECORD.size)[0] != extend_crc32c(seed, body):
        return None
    return RecordHeader._make(_RECORD.unpack(body))


def iter_records(
    data: Mapped, start: int, end: int, seed: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """(ledger id, entry id, offset, size, payload checksum) of the records from `start` on.

    Stops at `end`, at the first header with a wrong checksum, and at a record that would reach
    beyond `end`.  Payloads are not verified.
    """
    header_bytes = RECORD_HEADER_BYTES
    body_bytes = _RECORD.size
    unpack = _RECORD_AND_CRC.unpack_from
    while start + header_bytes <= end:
        ledger_id, entry_id, size, payload_crc, header_crc = unpack(data, start)
        if header_crc != extend_crc32c(seed, data[start : start + body_bytes]):
            return
        after = start + header_bytes + size
        if after > end:
            return
        yield ledger_id, entry_id, start, size, payload_crc
        start = after


def find_group(data: Mapped, start: int, end: int, nonce: int) -> int | None:
    """Offset of the first valid group header at or after `start`, None if there is none."""
    at = data.find(GROUP_MAGIC, start, end)
    while at >= 0:
        if decode_group_header(data[at : at + GROUP_HEADER_BYTES], nonce, at) is not None:
            return at
        at = data.find(GROUP_MAGIC, at + 1, end)
    return None


def nonce_of_first_group(data: Mapped) -> int | None:
    """The nonce from the first group, for a file whose header is damaged; None if that is too."""
    head = data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + GROUP_HEADER_BYTES]
    if len(head) < GROUP_HEADER_BYTES:
        return None
    nonce = int(_GROUP.unpack_from(head)[1])
    return None if decode_group_header(head, nonce, FILE_HEADER_BYTES) is None else nonce


def has_any_group(data: Mapped) -> bool:
    """Whether there is a valid group header, of this file or any other."""
    at = data.find(GROUP_MAGIC)
    while at >= 0:
        head = data[at : at + GROUP_HEADER_BYTES]
        if len(head) == GROUP_HEADER_BYTES:
            nonce = int(_GROUP.unpack_from(head)[1])
            if decode_group_header(head, nonce, at) is not None:
                return True
        at = data.find(GROUP_MAGIC, at + 1)
    return False
