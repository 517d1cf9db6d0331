"""Sums of messages and bytes over ranges of a stream's entries, from the ledgers' indexes."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from config.bounds import COUNTED_BLOCKS_KEPT, READ_BATCH_BYTES
from magnetar.protocol.ids import EARLIEST, Position
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.entry_index import EntryFacts, LedgerIndex, Sums, facts_of
from storage.managed_ledger.ledger_indexes import LedgerIndexes, ReadEntries
from storage.managed_ledger.ledger_map import LedgerInfo


class _Span(NamedTuple):
    """Entries first..end-1 of one ledger, at least one."""

    info: LedgerInfo
    first: int
    end: int

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.end == self.info.entries


class StreamRanges:
    """Exact numbers of messages and bytes in ranges of a stream; few entries are read for them.

    A range goes from one position up to, and without, another.  Neither need exist; both are at or
    before the end of the readable entries.  Blocks of `LedgerIndexes` are added up; only in blocks
    that a range divides entries are read.  Ledgers trimmed meanwhile count nothing: compare
    `first_retained` to detect that.  All methods raise as `StreamReader.read`.
    """

    __slots__ = ("_core", "_counted", "_index", "_read")

    def __init__(self, core: StreamCore, index: LedgerIndexes, read: ReadEntries) -> None:
        self._core = core
        self._index = index
        self._read = read
        self._counted: dict[tuple[int, int, int], list[EntryFacts]] = {}
        """Entries of the blocks read last, by ledger, first entry and end of the block."""

    @property
    def first_retained(self) -> Position:
        """The first entry that was not trimmed; the end if there is none."""
        return max(self._core.ledgers.at_or_after(EARLIEST), EARLIEST)

    @property
    def end(self) -> Position:
        """The position after the newest entry, trimmed or not; EARLIEST if there never was one."""
        newest = max(self._core.last_confirmed, self._core.last_trimmed or EARLIEST)
        return after(newest)

    def look_ahead(self, first: Position) -> asyncio.Task[None]:
        """Start to build the indexes of all ledgers from that one on; the task runs to its end."""
        return self._index.look_ahead(first.ledger_id)

    async def sums(self, first: Position, end: Position) -> Sums:
        """Sums over the entries of a range."""
        found = Sums()
        for span in self._spans(first, end):
            totals = self._index.known_totals(span.info) if span.whole else None
            found.add(await self._sums(span) if totals is None else totals)
        return found

    async def fitting(
        self, first: Position, end: Position, max_messages: int, max_bytes: int
    ) -> tuple[Position, Sums]:
        """The end and the sums of the longest prefix within both bounds, at least one entry.

        The end is the position after its last entry; `first` if the range has no entry.
        """
        budget = _Budget(first, max_messages, max_bytes)
        for span in self._spans(first, end):
            known = self._index.known_totals(span.info) if span.whole else None
            if known is not None and budget.allows(known):
                budget.spend(Position(span.info.ledger_id, span.end), known)
            elif not await self._spend_on(budget, span):
                break
        return budget.end, budget.sums

    async def first_published(
        self, first: Position, end: Position, since_ms: int
    ) -> Position | None:
        """The first entry of a range that was published at `since_ms` or later, or None."""
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

    # Within a ledger.  At any await its index may grow, and its blocks with it.

    async def _sums(self, span: _Span) -> Sums:
        """Sums over a part of a ledger."""
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
            for facts in await self._facts(index, span.info.ledger_id, at, end):
                found.add_entry(facts)
            at = end
        return found

    async def _spend_on(self, budget: "_Budget", span: _Span) -> bool:
        """Take the entries of a span that fit; True if all did."""
        ledger_id, at = span.info.ledger_id, span.first
        index = await self._index.of(ledger_id)
        while index is not None and at < span.end:
            low, high = index.blocks_at(at, span.end)
            fits = index.fitting(low, high, budget.messages, budget.size_bytes)
            if low < fits:
                at = index.entries_of(fits - 1)[1]
                budget.spend(Position(ledger_id, at), index.sums(low, fits))
                continue
            end = min(index.entries_of(low)[1], span.end)
            facts = await self._facts(index, ledger_id, at, end)
            if not budget.spend_on_entries(ledger_id, at, facts):
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
            for entry_id, each in enumerate(facts, at):
                if each.publish_time_ms >= since_ms:
                    return entry_id
            at = end
        return None

    async def _facts(
        self, index: LedgerIndex, ledger_id: int, first: int, end: int
    ) -> Sequence[EntryFacts]:
        """The facts of entries first..end-1; fewer if the ledger is trimmed meanwhile."""
        facts: list[EntryFacts] = []
        while first < end:
            low, high = index.entries_of(first // index.stride)
            upto = min(high, end)
            if high - low < index.stride:  # the newest block: it grows
                facts += await self._count(ledger_id, first, upto)
            else:
                facts += (await self._block(ledger_id, low, high))[first - low : upto - low]
            first = upto
        return facts

    async def _block(self, ledger_id: int, low: int, high: int) -> list[EntryFacts]:
        """The facts of the entries of a whole block, from memory if it was read lately."""
        # The next plan often begins in the block where the last one ended.
        key = (ledger_id, low, high)
        facts = self._counted.pop(key, None)
        if facts is None:
            facts = await self._count(*key)
        if len(facts) == high - low:
            self._counted[key] = facts
            if len(self._counted) > COUNTED_BLOCKS_KEPT:
                del self._counted[next(iter(self._counted))]
        return facts

    async def _count(self, ledger_id: int, first: int, end: int) -> list[EntryFacts]:
        facts: list[EntryFacts] = []
        while first < end:
            entries = await self._read(
                Position(ledger_id, first),
                max_entries=end - first,
                max_bytes=READ_BATCH_BYTES,
                up_to=Position(ledger_id, end - 1),
            )
            if not entries or entries[0].position != Position(ledger_id, first):
                break
            facts += [facts_of(entry.data) for entry in entries]
            first += len(entries)
        return facts


class _Budget:
    """Messages and bytes that may still be taken, the sums of those taken, and their end."""

    __slots__ = ("end", "messages", "size_bytes", "sums")

    def __init__(self, end: Position, max_messages: int, max_bytes: int) -> None:
        self.end = end
        self.messages = max_messages
        self.size_bytes = max_bytes
        self.sums = Sums()

    def allows(self, sums: Sums) -> bool:
        """Whether entries with these sums are within both bounds."""
        return sums.messages <= self.messages and sums.size_bytes <= self.size_bytes

    def spend(self, end: Position, sums: Sums) -> None:
        """Take the entries up to `end`, which have these sums."""
        self.sums.add(sums)
        self.messages -= sums.messages
        self.size_bytes -= sums.size_bytes
        self.end = end

    def spend_on_entries(self, ledger_id: int, first: int, facts: Sequence[EntryFacts]) -> bool:
        """Take entries from `first` on while they fit; True if all did."""
        for entry_id, each in enumerate(facts, first):
            fits = each.messages <= self.messages and each.size_bytes <= self.size_bytes
            # The very first entry is taken whatever its size, so that callers make progress.
            if not fits and self.sums.entries:
                return False
            self.sums.add_entry(each)
            self.messages -= each.messages
            self.size_bytes -= each.size_bytes
            self.end = Position(ledger_id, entry_id + 1)
        return True


def after(position: Position) -> Position:
    """The position right after an entry; EARLIEST, which has no entry, stays as it is."""
    if position.ledger_id < 0:
        return EARLIEST
    return position.following
