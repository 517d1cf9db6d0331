"""Pure: the bytes of a copy, in the layout of Apache Pulsar's offloader for object stores.

The data object is a run of blocks.  Numbers are big-endian:

    block   magic FB DB AB CB | length of the head (128): 8 | length of the block: 8 |
            first entry id: 8 | zeros up to 128 | entries | padding FE DC DE AD ...
    entry   size: 4 | entry id: 8 | the bytes that were appended

The index object has the offsets of the blocks, and the ledger's metadata (BookKeeper's record
without its first line):

    magic DE 47 DE 47 | length: 4 | length of the data object: 8 | length of a block's head: 8 |
    number of blocks: 4 | length of the metadata: 4 | metadata |
    (first entry id: 8 | number of the block from 1 on: 4 | offset: 8) for each block

Copies that Magnetar writes have checksums besides.  Custom metadata of the ledger, which Pulsar
does not change, has the CRC32C of each block, and SHA-256 of the data object and of the entries in
their frames alone.  Behind the index are `MGTX` and the CRC32C of all bytes before, where Pulsar
does not read.  Blocks have at least one entry and no padding.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import google_crc32c
from google.protobuf.message import DecodeError

from storage.ledger.bookkeeper import ledger_metadata_pb2 as pb

BLOCK_HEAD_BYTES: Final = 128
FRAME_HEAD_BYTES: Final = 12
_BLOCK_MAGIC: Final = 0xFBDBABCB
_INDEX_MAGIC: Final = 0xDE47DE47
_TRAILER_MAGIC: Final = b"MGTX"
_BLOCK_HEAD: Final = struct.Struct(">Iqqq")
_FRAME_HEAD: Final = struct.Struct(">iq")
_INDEX_HEAD: Final = struct.Struct(">Iiqqii")
_INDEX_ENTRY: Final = struct.Struct(">qiq")
_TRAILER_BYTES: Final = 8
_NO_BOOKIE: Final = "offloaded"
_VERSION_KEY: Final = "magnetar/offload-format"
_VERSION: Final = b"1"
_CRCS_KEY: Final = "magnetar/block-crc32c"
_DATA_SHA_KEY: Final = "magnetar/data-sha256"
_ENTRIES_SHA_KEY: Final = "magnetar/entries-sha256"
_FIRST_PUBLISHED_KEY: Final = "magnetar/first-publish-time-ms"
_LAST_PUBLISHED_KEY: Final = "magnetar/last-publish-time-ms"
_CHECKED_KEYS: Final = frozenset({_VERSION_KEY, _CRCS_KEY, _DATA_SHA_KEY, _ENTRIES_SHA_KEY})
_OWN_KEYS: Final = _CHECKED_KEYS | {_FIRST_PUBLISHED_KEY, _LAST_PUBLISHED_KEY}


class MalformedCopy(ValueError):
    """Bytes that are no copy, or a damaged one; the message tells what is wrong."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its first entry, its offset, and its CRC32C, None if that is not known."""

    first_entry: int
    offset: int
    crc32c: int | None = None


@dataclass(frozen=True, slots=True)
class Checks:
    """Checksums of a copy that Magnetar wrote."""

    data_sha256: bytes
    entries_sha256: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """The content of the index object.

    `entries_bytes` is the sum of the sizes of the entries.  Publish times are those of the first
    and the last entry, ms since the epoch, if they are messages.  `checks` is None in copies that
    Apache Pulsar wrote: their blocks are only parsed strictly.
    """

    entries: int
    entries_bytes: int
    data_bytes: int
    blocks: tuple[Block, ...]
    checks: Checks | None = None
    first_published_ms: int | None = None
    last_published_ms: int | None = None
    custom: Mapping[str, bytes] = field(default_factory=dict)
    created_ms: int = 0

    def end_of(self, number: int) -> int:
        """Offset behind a block, by its index in `blocks`."""
        after = number + 1
        return self.blocks[after].offset if after < len(self.blocks) else self.data_bytes


def encode_frame(entry_id: int, entry: bytes) -> bytes:
    """The head of a frame, before the entry's bytes."""
    return _FRAME_HEAD.pack(len(entry), entry_id)


def encode_block_head(length: int, first_entry: int) -> bytes:
    """The head of a block of `length` bytes, head included."""
    head = _BLOCK_HEAD.pack(_BLOCK_MAGIC, BLOCK_HEAD_BYTES, length, first_entry)
    return head.ljust(BLOCK_HEAD_BYTES, b"\0")


def encode_block(first_entry: int, entries: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The head of a block, and its entries in their frames."""
    parts: list[bytes] = []
    for entry_id, entry in enumerate(entries, first_entry):
        parts += (encode_frame(entry_id, entry), entry)
    body = b"".join(parts)
    return encode_block_head(BLOCK_HEAD_BYTES + len(body), first_entry), body


def check_block_head(data: bytes | memoryview, first_entry: int, length: int) -> None:
    """Raise `MalformedCopy` unless a block of that first entry and length begins here."""
    if len(data) < _BLOCK_HEAD.size:
        raise MalformedCopy("the head of a block is incomplete")
    magic, head, found_length, found_first = _BLOCK_HEAD.unpack_from(data)
    if magic != _BLOCK_MAGIC or (found_length, found_first) != (length, first_entry):
        raise MalformedCopy(
            f"no block of {length} bytes from entry {first_entry} on begins there, but magic "
            f"{magic:08x}, length {found_length}, entry {found_first}"
        )
    if head < _BLOCK_HEAD.size:
        raise MalformedCopy(f"the head of a block says to have {head} bytes")


@dataclass(frozen=True, slots=True)
class ParsedEntries:
    """Entries parsed from part of a block, in its first `used` bytes.

    `ended`: padding or another block follows.  `wanted`: number of bytes from `used` on that the
    next entry has, or its frame's head if that is not complete.
    """

    entries: list[bytes]
    used: int
    ended: bool
    wanted: int = FRAME_HEAD_BYTES


def parse_entries(data: bytes | memoryview, first_entry: int) -> ParsedEntries:
    """Parse the whole entries in `data`, which begins with one.  Raises `MalformedCopy`."""
    view = memoryview(data)
    entries: list[bytes] = []
    at, entry_id, end = 0, first_entry, len(view)
    while end - at >= 4:
        if view[at] & 0x80:
            return ParsedEntries(entries, at, ended=True)
        if end - at < FRAME_HEAD_BYTES:
            break
        size, found = _FRAME_HEAD.unpack_from(view, at)
        if found != entry_id:
            raise MalformedCopy(f"entry {found} is where entry {entry_id} is due")
        begin = at + FRAME_HEAD_BYTES
        if end - begin < size:
            return ParsedEntries(entries, at, ended=False, wanted=FRAME_HEAD_BYTES + size)
        at = begin + size
        entries.append(bytes(view[begin:at]))
        entry_id += 1
    return ParsedEntries(entries, at, ended=False)


def encode_index(index: Index) -> bytes:
    """Encode the index object."""
    metadata = _encode_metadata(index)
    length = _INDEX_HEAD.size + len(metadata) + len(index.blocks) * _INDEX_ENTRY.size
    head = _INDEX_HEAD.pack(
        _INDEX_MAGIC,
        length,
        index.data_bytes,
        BLOCK_HEAD_BYTES,
        len(index.blocks),
        len(metadata),
    )
    entries = (
        _INDEX_ENTRY.pack(block.first_entry, number, block.offset)
        for number, block in enumerate(index.blocks, 1)
    )
    whole = b"".join((head, metadata, *entries))
    if index.checks is None:
        return whole
    crc32c: int = google_crc32c.value(whole)
    return whole + _TRAILER_MAGIC + crc32c.to_bytes(4, "big")


def _encode_metadata(index: Index) -> bytes:
    metadata = pb.LedgerMetadataFormat(
        quorumSize=1,
        ensembleSize=1,
        ackQuorumSize=1,
        length=index.entries_bytes,
        lastEntryId=index.entries - 1,
        state=pb.LedgerMetadataFormat.CLOSED,
        digestType=pb.LedgerMetadataFormat.CRC32C,
        ctime=index.created_ms,
    )
    # Pulsar's parsers want as many bookies as ensembleSize says; this one is never contacted.
    metadata.segment.add(firstEntryId=0, ensembleMember=[_NO_BOOKIE])
    own = dict(index.custom)
    if index.checks is not None:
        own[_VERSION_KEY] = _VERSION
        own[_CRCS_KEY] = b"".join((block.crc32c or 0).to_bytes(4, "big") for block in index.blocks)
        own[_DATA_SHA_KEY] = index.checks.data_sha256
        own[_ENTRIES_SHA_KEY] = index.checks.entries_sha256
    for key, time_ms in (
        (_FIRST_PUBLISHED_KEY, index.first_published_ms),
        (_LAST_PUBLISHED_KEY, index.last_published_ms),
    ):
        if time_ms is not None:
            own[key] = str(time_ms).encode()
    for key in sorted(own):
        metadata.customMetadata.add(key=key, value=own[key])
    data: bytes = metadata.SerializeToString()
    return data


def decode_index(data: bytes) -> Index:
    """Decode an index object.  Raises `MalformedCopy`."""
    if len(data) < _INDEX_HEAD.size:
        raise MalformedCopy(f"an index of {len(data)} bytes is incomplete")
    magic, _, data_bytes, _, blocks, metadata_bytes = _INDEX_HEAD.unpack_from(data)
    if magic != _INDEX_MAGIC:
        raise MalformedCopy(f"an index does not begin with {magic:08x}")
    begin = _INDEX_HEAD.size + metadata_bytes
    end = begin + blocks * _INDEX_ENTRY.size
    if metadata_bytes < 0 or blocks <= 0 or end > len(data):
        raise MalformedCopy(f"an index of {blocks} blocks does not fit into {len(data)} bytes")
    metadata = _decode_metadata(data[_INDEX_HEAD.size : begin])
    custom = {item.key: item.value for item in metadata.customMetadata}
    checked = _VERSION_KEY in custom or len(data) > end
    if checked:
        _check_trailer(data, end, custom)
    crcs = custom.get(_CRCS_KEY, b"") if checked else b""
    if checked and len(crcs) != 4 * blocks:
        raise MalformedCopy(f"{len(crcs)} bytes are no checksums of {blocks} blocks")
    found = [
        Block(first, offset, _number(crcs, place))
        for place, (first, _, offset) in enumerate(_INDEX_ENTRY.iter_unpack(data[begin:end]))
    ]
    index = Index(
        metadata.lastEntryId + 1,
        metadata.length,
        data_bytes,
        tuple(found),
        Checks(custom[_DATA_SHA_KEY], custom[_ENTRIES_SHA_KEY]) if checked else None,
        _time(custom, _FIRST_PUBLISHED_KEY),
        _time(custom, _LAST_PUBLISHED_KEY),
        {key: value for key, value in custom.items() if key not in _OWN_KEYS},
        metadata.ctime,
    )
    _check_order(index)
    return index


def _decode_metadata(data: bytes) -> pb.LedgerMetadataFormat:
    metadata = pb.LedgerMetadataFormat()
    try:
        metadata.ParseFromString(data)
    except DecodeError as error:
        raise MalformedCopy("the metadata of the ledger in an index are no such record") from error
    if not metadata.IsInitialized() or metadata.state != pb.LedgerMetadataFormat.CLOSED:
        raise MalformedCopy("the metadata in an index are not those of a closed ledger")
    return metadata


def _check_trailer(data: bytes, end: int, custom: Mapping[str, bytes]) -> None:
    trailer = data[end:]
    if len(trailer) != _TRAILER_BYTES or not trailer.startswith(_TRAILER_MAGIC):
        raise MalformedCopy("the end of an index is missing")
    if int.from_bytes(trailer[4:], "big") != google_crc32c.value(data[:end]):
        raise MalformedCopy("an index fails its checksum")
    if custom.get(_VERSION_KEY, _VERSION) != _VERSION:
        raise MalformedCopy(f"a copy of version {custom[_VERSION_KEY]!r} is from a newer release")
    if not custom.keys() >= _CHECKED_KEYS:
        raise MalformedCopy("an index lacks its checksums")


def _check_order(index: Index) -> None:
    firsts = [block.first_entry for block in index.blocks]
    offsets = [block.offset for block in index.blocks] + [index.data_bytes]
    rising = all(low < high for low, high in pairwise(firsts)) and all(
        low + BLOCK_HEAD_BYTES <= high for low, high in pairwise(offsets)
    )
    if not rising or firsts[0] != 0 or offsets[0] < 0 or firsts[-1] >= index.entries:
        raise MalformedCopy("the blocks that an index names are not in order")


def _number(crcs: bytes, place: int) -> int | None:
    return int.from_bytes(crcs[4 * place : 4 * place + 4], "big") if crcs else None


def _time(custom: Mapping[str, bytes], key: str) -> int | None:
    value = custom.get(key, b"")
    return int(value) if value.isdigit() else None
