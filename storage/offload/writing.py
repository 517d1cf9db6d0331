"""Writes the copy of an ended ledger, and verifies it by reading it again."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from uuid import UUID

import google_crc32c

from config.bounds import OFFLOAD_BLOCK_BYTES
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.message import parse_metadata
from storage.ledger.store import ReadableLedger
from storage.offload.context import data_key, index_key
from storage.offload.errors import OffloadedDataCorrupt, OffloadFailed
from storage.offload.format import (
    BLOCK_HEAD_BYTES,
    Block,
    Checks,
    Index,
    MalformedCopy,
    check_block_head,
    decode_index,
    encode_block,
    encode_index,
    parse_entries,
)
from storage.offload.objects import Objects


@dataclass(frozen=True, slots=True)
class CopyMetadata:
    """Custom metadata of a copy, for tools, and the time it was made."""

    custom: Mapping[str, bytes]
    created_ms: int


class _Packer:
    """Packs entries into blocks, and counts them.  Used in threads, one block at a time."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.data_bytes = 0
        self.entries = 0
        self.entries_bytes = 0
        self.first_published_ms: int | None = None
        self.last_published_ms: int | None = None
        self._data_sha = hashlib.sha256()
        self._entries_sha = hashlib.sha256()

    def pack(self, entries: list[bytes]) -> bytes:
        head, body = encode_block(self.entries, entries)
        whole = head + body
        self.blocks.append(Block(self.entries, self.data_bytes, google_crc32c.value(whole)))
        self._data_sha.update(whole)
        self._entries_sha.update(body)
        if not self.entries:
            self.first_published_ms = published_ms(entries[0])
        self.last_published_ms = published_ms(entries[-1])
        self.data_bytes += len(whole)
        self.entries += len(entries)
        self.entries_bytes += sum(map(len, entries))
        return whole

    def index(self, metadata: CopyMetadata) -> Index:
        return Index(
            self.entries,
            self.entries_bytes,
            self.data_bytes,
            tuple(self.blocks),
            Checks(self._data_sha.digest(), self._entries_sha.digest()),
            self.first_published_ms,
            self.last_published_ms,
            metadata.custom,
            metadata.created_ms,
        )


def published_ms(entry: bytes) -> int | None:
    """Publish time of a message; None for an entry that is no message."""
    try:
        return int(parse_metadata(entry).publish_time)
    except FrameError:
        return None


async def write_copy(
    ledger: ReadableLedger, objects: Objects, uid: UUID, metadata: CopyMetadata
) -> Index:
    """Write both objects of an ended ledger that is not empty, the index last.

    Only a few blocks are in memory at a time.  Raises `LedgerError`; objects written before stay:
    delete them by the uid.
    """
    ledger_id = int(ledger.ledger_id)
    packer = _Packer()

    async def blocks() -> AsyncIterator[bytes]:
        last = ledger.last_add_confirmed
        while packer.entries <= last:
            entries = await ledger.read(packer.entries, last, max_bytes=OFFLOAD_BLOCK_BYTES)
            yield await asyncio.to_thread(packer.pack, entries)

    await objects.put(data_key(uid, ledger_id), blocks())
    index = packer.index(metadata)
    await objects.put_whole(index_key(uid, ledger_id), encode_index(index))
    return index


async def read_index(objects: Objects, uid: UUID, ledger_id: int) -> Index:
    """Read the index of a copy.

    Raises `OffloadedDataCorrupt`, `OffloadedDataLost`, `OffloadFailed`.
    """
    key = index_key(uid, ledger_id)
    data = await objects.read(key, 0, await objects.size(key))
    try:
        return decode_index(data)
    except MalformedCopy as error:
        raise OffloadedDataCorrupt(
            f"The object {key} is damaged ({error}): restore it, or an earlier version of it."
        ) from error


async def verify_copy(objects: Objects, uid: UUID, ledger_id: int, written: Index) -> None:
    """Read both objects of a new copy and compare them with what was written.

    A copy is complete only after this.  Raises `OffloadFailed`, and as `read_index`.
    """
    found = await read_index(objects, uid, ledger_id)
    if found != written:
        raise OffloadFailed(
            f"The index of offloaded ledger {ledger_id} differs from what was written: check the "
            "place for copies, which changes data."
        )
    key = data_key(uid, ledger_id)
    data_sha, entries_sha = hashlib.sha256(), hashlib.sha256()

    def check(number: int, data: bytes) -> int:
        block = written.blocks[number]
        check_block_head(data, block.first_entry, written.end_of(number) - block.offset)
        if google_crc32c.value(data) != block.crc32c:
            raise MalformedCopy(f"block {number} fails its checksum")
        body = memoryview(data)[BLOCK_HEAD_BYTES:]
        data_sha.update(data)
        entries_sha.update(body)
        return len(parse_entries(body, block.first_entry).entries)

    entries = 0
    try:
        for number, block in enumerate(written.blocks):
            data = await objects.read(key, block.offset, written.end_of(number) - block.offset)
            entries += await asyncio.to_thread(check, number, data)
        if await objects.size(key) != written.data_bytes or entries != written.entries:
            raise MalformedCopy(f"it has {entries} entries instead of {written.entries}")
        if written.checks != Checks(data_sha.digest(), entries_sha.digest()):
            raise MalformedCopy("it fails its checksum")
    except MalformedCopy as error:
        raise OffloadFailed(
            f"The object {key} differs from what was written ({error}): check the place for "
            "copies, which changes data."
        ) from error
