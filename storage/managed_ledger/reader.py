"""Reading of one managed ledger: over the ends of ledgers, from the cache first."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from config import bounds
from magnetar.protocol.ids import LATEST, LedgerId, Position
from storage.callbacks import ignore
from storage.ledger.store import (
    CorruptEntry,
    LedgerAssertion,
    LedgerError,
    NoSuchLedger,
    ReadableLedger,
)
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.types import Entry
from storage.metadata.store import MetadataError
from storage.offload.context import InvalidOffloadUrl, OffloadContext

log = structlog.get_logger(__name__)


class StreamReader:
    """Reads entries of one managed ledger, from the cache first, never past the last confirmed one.

    `current` gives the handle of the ledger being written.
    """

    __slots__ = ("_core", "_current", "_handles", "_on_lost")

    def __init__(
        self,
        core: StreamCore,
        current: Callable[[int], ReadableLedger | None],
        on_lost: Callable[[int], None],
    ) -> None:
        """`on_lost` is called with a ledger of which entries turned out to be lost."""
        self._core = core
        self._on_lost = on_lost
        self._current = current
        self._handles: dict[int, asyncio.Task[ReadableLedger]] = {}

    def release(self) -> None:
        """Drop the callbacks of a closed stream; see `StreamCore.release`."""
        self._current = ignore

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """Consecutive entries from the first at or after `start`, from memory; [] at the end.

        None: the first one is not in the cache, use `read`.
        """
        core = self._core
        ledger_id, first = start
        run = core.stores.cache.run(ledger_id, first, first + max_entries - 1)
        if run is None:
            found = core.ledgers.at_or_after(start)
            if found > core.last_confirmed:
                return []
            if found == start:
                return None
            ledger_id, first = found
            run = core.stores.cache.run(ledger_id, first, first + max_entries - 1)
            if run is None:
                return None
        return _fitting(run, max_bytes)

    async def read(
        self, start: Position, *, max_entries: int, max_bytes: int, up_to: Position = LATEST
    ) -> list[Entry]:
        """Entries from the first at or after `start`, at most to `up_to`; [] at the end.

        `start` need not exist.  `max_bytes` bounds their data, but one entry always comes.  Raises
        `LedgerError`, `MetadataError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`.
        """
        core = self._core
        core.require_running()
        entries: list[Entry] = []
        bytes_left = max_bytes
        limit = min(core.last_confirmed, up_to)
        position = self._after_lost(core.ledgers.at_or_after(start))
        while position <= limit and len(entries) < max_entries and (bytes_left > 0 or not entries):
            run = await self._read_run(position, limit, max_entries - len(entries), bytes_left)
            for entry in run:
                bytes_left -= len(entry.data)
                if bytes_left < 0 and entries:
                    return entries
                entries.append(entry)
            if run:
                position = self._after_lost(core.ledgers.next(run[-1].position))
            else:
                # The ledger was trimmed while it was read, or the entry was lost: go on after it.
                position = self._after_lost(core.ledgers.at_or_after(position))
        return entries

    def _after_lost(self, position: Position) -> Position:
        """The first position from this one on that is not known to be lost."""
        core = self._core
        while missing := core.lost_entries(position.ledger_id):
            ends = [last for first, last in missing if first <= position.entry_id <= last]
            following = core.ledgers.next(Position(position.ledger_id, ends[0])) if ends else None
            if following is None or following <= position:
                break
            position = following
        return position

    async def _read_run(
        self, start: Position, limit: Position, max_entries: int, max_bytes: int
    ) -> Sequence[Entry]:
        """Entries of one ledger from `start`, which exists; [] if the ledger was trimmed."""
        core = self._core
        ledger_id, first = start
        info = core.ledgers.get(ledger_id)
        if info is None:
            return []
        last = min(first + max_entries, info.entries) - 1
        if ledger_id == limit.ledger_id:
            last = min(last, limit.entry_id)
        for lost, _ in core.lost_entries(ledger_id):
            if first < lost <= last:
                last = lost - 1
        run = core.stores.cache.run(ledger_id, first, last)
        if run is not None:
            return _fitting(run, max_bytes)
        try:
            stored = await self._read_stored(ledger_id, first, last, max(max_bytes, 0))
        except NoSuchLedger:
            if core.ledgers.get(ledger_id) is None:
                return []
            raise
        except CorruptEntry:
            # The store noted it.  It is stepped over if the operator chose that.
            if self._after_lost(start) == start:
                raise
            self._on_lost(ledger_id)
            return []
        return [
            Entry(Position(ledger_id, entry_id), data)
            for entry_id, data in enumerate(stored, first)
        ]

    async def _read_stored(
        self, ledger_id: int, first: int, last: int, max_bytes: int
    ) -> Sequence[bytes]:
        ledger = self._current(ledger_id)
        if ledger is None:
            ledger = await self._open(ledger_id)
            copy = self._copy_of(ledger_id)
            if copy is not None:
                try:
                    return await ledger.read(first, last, max_bytes=max_bytes)
                except NoSuchLedger:
                    # Deleted since it was opened: the copy has the entries.
                    self.forget(ledger_id)
                    ledger = await self._open(ledger_id)
                except CorruptEntry:
                    ledger = await self._core.stores.cold.open(ledger_id, copy)
        return await ledger.read(first, last, max_bytes=max_bytes)

    def forget(self, ledger_id: int) -> None:
        """Drop the ledger's handle; the next read opens it anew."""
        self._handles.pop(ledger_id, None)

    def _copy_of(self, ledger_id: int) -> OffloadContext | None:
        info = self._core.ledgers.get(ledger_id)
        if info is None or info.offload is None or not info.offload.complete:
            return None
        return info.offload

    async def _open(self, ledger_id: int) -> ReadableLedger:
        """The handle of an ended ledger, opened once for all that wait."""
        handle = self._handles.get(ledger_id)
        if handle is None:
            info = self._core.ledgers.get(ledger_id)
            if info is not None and info.closed_ms == 0:
                # Opening the current ledger would fence our own writer.
                raise LedgerAssertion(
                    f"Ledger {ledger_id} of {self._core.name} has not ended and has no writer: "
                    "report this as a defect."
                )
            handle = self._core.loop.create_task(self._open_ended(ledger_id))
            self._handles[ledger_id] = handle
            if len(self._handles) > bounds.OPEN_LEDGER_HANDLES:
                del self._handles[next(iter(self._handles))]
        try:
            return await asyncio.shield(handle)
        except (LedgerError, MetadataError, InvalidOffloadUrl):
            if self._handles.get(ledger_id) is handle:
                del self._handles[ledger_id]
            raise

    async def _open_ended(self, ledger_id: int) -> ReadableLedger:
        stores, copy = self._core.stores, self._copy_of(ledger_id)
        if copy is None:
            return await stores.ledgers.open(LedgerId(ledger_id))
        if not copy.hot_deleted:
            try:
                return await stores.ledgers.open(LedgerId(ledger_id))
            except NoSuchLedger:
                log.info("offloaded_ledger_is_gone", name=self._core.name, ledger=ledger_id)
        return await stores.cold.open(ledger_id, copy)

    async def find_first(self, predicate: Callable[[Entry], bool]) -> Position | None:
        """The first entry for which `predicate` holds, if it holds for all after it; or None."""
        core = self._core
        low = core.ledgers.total - core.ledgers.entry_count
        end = high = core.ledgers.rank(core.last_confirmed)
        while low < high:
            middle = (low + high) // 2
            found = await self.read(core.ledgers.at(middle), max_entries=1, max_bytes=1)
            if not found or predicate(found[0]):
                high = middle
            else:
                low = core.ledgers.rank(found[0].position)
        return core.ledgers.at(low) if low < end else None


def _fitting(run: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """The first entries that fit into `max_bytes`, at least one."""
    bytes_left = max_bytes
    for index, entry in enumerate(run):
        bytes_left -= len(entry.data)
        if bytes_left < 0 and index:
            return list(run[:index])
    return list(run)
