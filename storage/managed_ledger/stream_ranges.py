"""What ranges of a stream's entries add up to: exact, though hardly anything is read.

Rules:

- A range is from one position up to, and without, another one; neither need exist.  Both are at or
  before the end of what is readable.
- Blocks of entry indexes are added up; of the blocks that a range cuts, the entries are read and
  counted one by one.
- What is trimmed meanwhile counts nothing; who needs to know compares `first_retained`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from config.bounds import COUNTED_BLOCKS_KEPT, READ_BATCH_BYTES
from magnetar.protocol.ids import EARLIEST, Position
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.entry_index import Fact, LedgerIndex, Sums, fact_of
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.stream_index import ReadEntries, StreamIndex


class _Span(NamedTuple):
    """Entries first..end-1 of one ledger, at least one."""

    info: LedgerInfo
    first: int
    end: int

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.end == self.info.entries


class StreamRanges:
    """Tells how many messages and bytes a range of a stream has, from its indexes.

    All raise what reading raises.
    """

    __slots__ = ("_core", "_counted", "_index", "_read")

    def __init__(self, core: StreamCore, index: StreamIndex, read: ReadEntries) -> None:
        self._core = core
        self._index = index
        self._read = read
        self._counted: dict[tuple[int, int, int], list[Fact]] = {}
        """By ledger, first entry and end of a block: what was read last."""

    @property
    def first_retained(self) -> Position:
        """The first entry that is there; the end if there is none."""
        return max(self._core.ledgers.at_or_after(EARLIEST), EARLIEST)

    @property
    def end(self) -> Position:
        """The place after the newest entry, be it trimmed; EARLIEST if there never was one."""
        newest = max(self._core.last_confirmed, self._core.last_trimmed or EARLIEST)
        return after(newest)

    def look_ahead(self, first: Position) -> asyncio.Task[None]:
        """Have what `sums` needs of whole ledgers from that one on; goes on if nobody waits."""
        return self._index.look_ahead(first.ledger_id)

    async def sums(self, first: Position, end: Position) -> Sums:
        """What the entries add up to."""
        found = Sums()
        for span in self._spans(first, end):
            totals = self._index.known_totals(span.info) if span.whole else None
            found.add(await self._sums(span) if totals is None else totals)
        return found

    async def fitting(
        self, first: Position, end: Position, max_messages: int, max_bytes: int
    ) -> tuple[Position, Sums]:
        """As many of the entries as are within both bounds, but one at least, and their end.

        The end is the place after the last of them; `first` if there is none.
        """
        room = _Room(first, max_messages, max_bytes)
        for span in self._spans(first, end):
            known = self._index.known_totals(span.info) if span.whole else None
            if known is not None and room.takes(known):
                room.add(Position(span.info.ledger_id, span.end), known)
            elif not await self._fill(room, span):
                break
        return room.end, room.sums

    async def first_published(
        self, first: Position, end: Position, since_ms: int
    ) -> Position | None:
        """The first of the entries whose publish time is that or later; None if none is."""
        for span in self._spans(first, end):
            known = self._index.known_totals(span.info)
            if known is not None and (known.greatest_ms or 0) < since_ms:
                continue
            found = await self._first_of(span, since_ms)
            if found is not None:
                return Position(span.info.ledger_id, found)
        return None

    def _spans(self, first: Position, end: Position) -> Iterator[_Span]:
        """The part of each ledger that is in the range, as the ledgers are now."""
        for info in list(self._core.ledgers.infos):
            low = first.entry_id if info.ledger_id == first.ledger_id else 0
            high = info.entries
            if info.ledger_id == end.ledger_id:
                high = min(high, end.entry_id)
            within = first.ledger_id <= info.ledger_id <= end.ledger_id
            if within and max(low, 0) < high:
                yield _Span(info, max(low, 0), high)

    # Within a ledger.  Its index may grow, and its blocks with it, whenever something is awaited.

    async def _sums(self, span: _Span) -> Sums:
        """What a part of a ledger adds up to."""
        found = Sums()
        index = await self._index.of(span.info.ledger_id)
        at = span.first
        while index is not None and at < span.end:
            low, high = index.blocks_at(at, span.end)
            if low < high:
                found.add(index.sums(low, high))
                at = index.entries_of(high - 1)[1]
                continue
            end = min(index.entries_of(low)[1], span.end)
            for fact in await self._facts(index, span.info.ledger_id, at, end):
                found.add_fact(fact)
            at = end
        return found

    async def _fill(self, room: "_Room", span: _Span) -> bool:
        """Take what fits of a span; whether all of it did."""
        ledger_id, at = span.info.ledger_id, span.first
        index = await self._index.of(ledger_id)
        while index is not None and at < span.end:
            low, high = index.blocks_at(at, span.end)
            fits = index.fitting(low, high, room.messages, room.size_bytes)
            if low < fits:
                at = index.entries_of(fits - 1)[1]
                room.add(Position(ledger_id, at), index.sums(low, fits))
                continue
            end = min(index.entries_of(low)[1], span.end)
            if not room.take(ledger_id, at, await self._facts(index, ledger_id, at, end)):
                return False
            at = end
        return True

    async def _first_of(self, span: _Span, since_ms: int) -> int | None:
        """The first entry of a span that was published at that time or later."""
        ledger_id, at = span.info.ledger_id, span.first
        index = await self._index.of(ledger_id)
        while index is not None and at < span.end:
            low, high = index.blocks_at(at, span.end)
            block = index.first_block_of(low, high, since_ms)
            if low < high and block is None:
                at = index.entries_of(high - 1)[1]
                continue
            first, end = index.entries_of(low if block is None else block)
            at, end = max(at, first), min(end, span.end)
            facts = await self._facts(index, ledger_id, at, end)
            for entry_id, fact in enumerate(facts, at):
                if fact.publish_time_ms >= since_ms:
                    return entry_id
            at = end
        return None

    async def _facts(
        self, index: LedgerIndex, ledger_id: int, first: int, end: int
    ) -> Sequence[Fact]:
        """What entries first..end-1 count; fewer if the ledger goes meanwhile."""
        facts: list[Fact] = []
        while first < end:
            low, high = index.entries_of(first // index.stride)
            upto = min(high, end)
            if high - low < index.stride:  # the newest block: it grows
                facts += await self._count(ledger_id, first, upto)
            else:
                facts += (await self._block(ledger_id, low, high))[first - low : upto - low]
            first = upto
        return facts

    async def _block(self, ledger_id: int, low: int, high: int) -> list[Fact]:
        """The facts of a whole block, which are kept for a while: plans go on where one ended."""
        key = (ledger_id, low, high)
        facts = self._counted.pop(key, None)
        if facts is None:
            facts = await self._count(*key)
        if len(facts) == high - low:
            self._counted[key] = facts
            if len(self._counted) > COUNTED_BLOCKS_KEPT:
                del self._counted[next(iter(self._counted))]
        return facts

    async def _count(self, ledger_id: int, first: int, end: int) -> list[Fact]:
        facts: list[Fact] = []
        while first < end:
            entries = await self._read(
                Position(ledger_id, first),
                max_entries=end - first,
                max_bytes=READ_BATCH_BYTES,
                up_to=Position(ledger_id, end - 1),
            )
            if not entries or entries[0].position != Position(ledger_id, first):
                break
            facts += [fact_of(entry.data) for entry in entries]
            first += len(entries)
        return facts


class _Room:
    """What may still be taken, what was, and where that ends."""

    __slots__ = ("end", "messages", "size_bytes", "sums")

    def __init__(self, end: Position, max_messages: int, max_bytes: int) -> None:
        self.end = end
        self.messages = max_messages
        self.size_bytes = max_bytes
        self.sums = Sums()

    def takes(self, sums: Sums) -> bool:
        """Whether all of that is within both bounds."""
        return sums.messages <= self.messages and sums.size_bytes <= self.size_bytes

    def add(self, end: Position, sums: Sums) -> None:
        """Take that; it is followed by `end`."""
        self.sums.add(sums)
        self.messages -= sums.messages
        self.size_bytes -= sums.size_bytes
        self.end = end

    def take(self, ledger_id: int, first: int, facts: Sequence[Fact]) -> bool:
        """Take entries from `first` on, the very first one whatever it is; whether all fit."""
        for entry_id, fact in enumerate(facts, first):
            fits = fact.messages <= self.messages and fact.size_bytes <= self.size_bytes
            if not fits and self.sums.entries:
                return False
            self.sums.add_fact(fact)
            self.messages -= fact.messages
            self.size_bytes -= fact.size_bytes
            self.end = Position(ledger_id, entry_id + 1)
        return True


def after(position: Position) -> Position:
    """The place right after an entry; EARLIEST, where nothing was before, stays."""
    if position.ledger_id < 0:
        return EARLIEST
    return Position(position.ledger_id, position.entry_id + 1)
