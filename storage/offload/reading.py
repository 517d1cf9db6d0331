"""`OffloadedLedger`: the copy of a ledger as a `ReadableLedger`."""

from bisect import bisect_right, insort
from functools import partial
from typing import NamedTuple

import google_crc32c

from config.bounds import OFFLOAD_BLOCK_BYTES, OFFLOAD_KNOWN_PLACES, OFFLOAD_READ_AHEAD_BLOCKS
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import NoSuchEntry, ReadableLedger
from storage.offload.block_cache import BlockCache, CachedBlock
from storage.offload.context import OffloadContext, data_key
from storage.offload.errors import OffloadedDataCorrupt
from storage.offload.format import (
    BLOCK_HEAD_BYTES,
    Index,
    MalformedCopy,
    ParsedEntries,
    check_block_head,
    parse_entries,
)
from storage.offload.objects import Objects


class _Place(NamedTuple):
    """The offset of an entry: at the head of its block, or inside of the block."""

    first_entry: int
    offset: int
    block: int
    at_head: bool


class OffloadedLedger(ReadableLedger):
    """A `ReadableLedger` over the copy of a ledger in object storage.

    Blocks that Magnetar wrote are fetched whole and checked (CRC32C, head, number of entries).
    Blocks of other writers may be large and have no checksum: they are fetched in windows.  For
    reads in order the next blocks are fetched ahead.  Damage raises `OffloadedDataCorrupt`.
    """

    def __init__(
        self,
        ledger_id: LedgerId,
        context: OffloadContext,
        index: Index,
        objects: Objects,
        cache: BlockCache,
    ) -> None:
        self._ledger_id = ledger_id
        self._uid = context.uid
        self._key = data_key(context.uid, ledger_id)
        self._url = context.location.url
        self.index = index
        self._objects = objects
        self._cache = cache
        self._places = [
            _Place(block.first_entry, block.offset, number, at_head=True)
            for number, block in enumerate(index.blocks)
        ]
        self._next_entry = -1

    @property
    def ledger_id(self) -> LedgerId:
        """See `ReadableLedger`."""
        return self._ledger_id

    @property
    def last_add_confirmed(self) -> int:
        """See `ReadableLedger`."""
        return self.index.entries - 1

    @property
    def length(self) -> int:
        """See `ReadableLedger`."""
        return self.index.entries_bytes

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        """See `ReadableLedger`.  Raises `NoSuchEntry`, and the errors in `errors`."""
        if not 0 <= first <= last <= self.last_add_confirmed:
            raise NoSuchEntry(
                f"Ledger {self._ledger_id} has entries 0 to {self.last_add_confirmed}, not "
                f"{first} to {last}: read within them."
            )
        in_order = first == self._next_entry
        found: list[bytes] = []
        bytes_left = max_bytes
        while first <= last:
            block = await self._block_of(first)
            if in_order and self.index.checks is not None:
                self._read_ahead(first)
            for entry in block.entries[first - block.first_entry :]:
                bytes_left -= len(entry)
                if (bytes_left < 0 and found) or first > last:
                    self._next_entry = first
                    return found
                found.append(entry)
                first += 1
            in_order = True
        self._next_entry = first
        return found

    async def _block_of(self, entry_id: int) -> CachedBlock:
        """A block or window that has the entry."""
        # From the nearest known place at or before the entry; where a window ends is remembered.
        while True:
            place = self._places[bisect_right(self._places, entry_id, key=_first_entry) - 1]
            block = await self._get(place)
            end = block.first_entry + len(block.entries)
            if entry_id < end:
                return block
            if block.next_offset is None or not block.entries:
                raise self._corrupt(f"entry {entry_id} is not in its block")
            self._remember(_Place(end, block.next_offset, place.block, at_head=False))

    def _remember(self, place: _Place) -> None:
        """Keep a place inside a block, where a later read may begin.

        At the bound all earlier ones are dropped.
        """
        known = bisect_right(self._places, place.first_entry, key=_first_entry) - 1
        if self._places[known].first_entry == place.first_entry:
            return
        if len(self._places) >= OFFLOAD_KNOWN_PLACES + len(self.index.blocks):
            self._places = [each for each in self._places if each.at_head]
        insort(self._places, place, key=_first_entry)

    def _read_ahead(self, entry_id: int) -> None:
        at = bisect_right(self._places, entry_id, key=_first_entry)
        for place in self._places[at : at + OFFLOAD_READ_AHEAD_BLOCKS]:
            if not self._cache.has(self._cached_as(place)):
                self._cache.fetch(self._cached_as(place), partial(self._fetch, place))

    def _cached_as(self, place: _Place) -> tuple[object, int, int]:
        return (self._uid, self._ledger_id, place.offset)

    async def _get(self, place: _Place) -> CachedBlock:
        return await self._cache.get(self._cached_as(place), partial(self._fetch, place))

    async def _fetch(self, place: _Place) -> CachedBlock:
        try:
            if self.index.blocks[place.block].crc32c is not None:
                return await self._checked_block(place.block)
            return await self._window(place)
        except MalformedCopy as error:
            raise self._corrupt(str(error)) from error

    async def _checked_block(self, number: int) -> CachedBlock:
        block, end = self.index.blocks[number], self.index.end_of(number)
        data = await self._objects.read(self._key, block.offset, end - block.offset)
        if google_crc32c.value(data) != block.crc32c:
            raise MalformedCopy(f"the block at {block.offset} fails its checksum")
        check_block_head(data, block.first_entry, end - block.offset)
        parsed = parse_entries(memoryview(data)[BLOCK_HEAD_BYTES:], block.first_entry)
        self._check_count(number, block.first_entry + len(parsed.entries))
        return CachedBlock(block.first_entry, parsed.entries, len(data), None)

    async def _window(self, place: _Place) -> CachedBlock:
        """The entries in one window, which is made larger if the first entry needs that."""
        end = self.index.end_of(place.block)
        head = BLOCK_HEAD_BYTES if place.at_head else 0
        length = head + OFFLOAD_BLOCK_BYTES
        while True:
            length = min(length, end - place.offset)
            data = memoryview(await self._objects.read(self._key, place.offset, length))
            if place.at_head:
                block = self.index.blocks[place.block]
                check_block_head(data, block.first_entry, end - block.offset)
            parsed = parse_entries(data[head:], place.first_entry)
            behind = place.offset + head + parsed.used
            if parsed.entries or parsed.ended or behind + parsed.wanted > end:
                break
            if len(data) < length:
                raise MalformedCopy(f"it ends after {place.offset + len(data)} bytes")
            length = head + parsed.wanted
        return self._cached_window(place, parsed, behind, end)

    def _cached_window(
        self, place: _Place, parsed: ParsedEntries, behind: int, end: int
    ) -> CachedBlock:
        if parsed.ended or end - behind < parsed.wanted:
            self._check_count(place.block, place.first_entry + len(parsed.entries))
            behind_or_none = None
        else:
            behind_or_none = behind
        return CachedBlock(place.first_entry, parsed.entries, behind - place.offset, behind_or_none)

    def _check_count(self, number: int, end_entry: int) -> None:
        """Raise `MalformedCopy` unless a block's entries go up to those of the next one."""
        blocks = self.index.blocks
        due = blocks[number + 1].first_entry if number + 1 < len(blocks) else self.index.entries
        if end_entry != due:
            raise MalformedCopy(
                f"the block at {blocks[number].offset} ends before entry {end_entry}, not {due}"
            )

    def _corrupt(self, reason: str) -> OffloadedDataCorrupt:
        return OffloadedDataCorrupt(
            f"The object {self._key} in {self._url} is damaged ({reason}): restore it, or an "
            "earlier version of it; nothing of it is delivered until then."
        )


def _first_entry(place: _Place) -> int:
    return place.first_entry
