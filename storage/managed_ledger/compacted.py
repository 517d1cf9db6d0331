"""The compacted ledger of one managed ledger (docs/decisions/compaction.md)."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import structlog

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import LedgerId, Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import LedgerError, LedgerStore, ReadableLedger, WritableLedger
from storage.managed_ledger.compacted_record import (
    COMPACTION_CURSOR,
    NO_LEDGER,
    PULSAR_LEDGER,
    Compacted,
    compacted_of,
    decode_compacted,
    unused_of,
    with_compaction,
)
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.types import CursorNotFound, Entry
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)
_HINTS: Final = 16


class StreamCursors(Protocol):
    """The cursors of a managed ledger."""

    @property
    def durable(self) -> Mapping[str, Cursor]:
        """Durable cursors by name."""
        ...


class CompactedLedger:
    """The newest message of each key up to the horizon, in order, at original positions.

    It never changes.  It is read between `StreamCompaction.use` and `leave`.
    """

    __slots__ = ("_hints", "_ledgers", "_opening", "ledger_id", "readers")

    def __init__(self, ledgers: LedgerStore, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.readers = 0
        """Number of `use` calls without `leave`."""
        self._ledgers = ledgers
        self._opening: asyncio.Task[ReadableLedger] | None = None
        # Where reads in order go on: the entry behind a position.  Others search for their start.
        self._hints: dict[Position, int] = {}

    async def read(self, start: Position, *, max_entries: int, max_bytes: int) -> list[Entry]:
        """Entries from the first at or after `start`; [] at the end.

        `max_bytes` bounds their data, but one entry always comes.  Raises `LedgerError`,
        `CorruptRecord`.
        """
        if self.ledger_id == NO_LEDGER:
            return []
        ledger = await self._open()
        first = self._hints.pop(start, None)
        if first is None:
            first = await self._find(ledger, start)
        last = min(ledger.last_add_confirmed, first + max_entries - 1)
        if first > last:
            return []
        stored = await ledger.read(first, last, max_bytes=max_bytes)
        entries = [decode_compacted(data) for data in stored]
        end = entries[-1].position
        self._hints[end.following] = first + len(entries)
        if len(self._hints) > _HINTS:
            del self._hints[next(iter(self._hints))]
        return entries

    async def last(self) -> Entry | None:
        """The last entry; None if there is none.  Raises as `read` does."""
        if self.ledger_id == NO_LEDGER:
            return None
        ledger = await self._open()
        end = ledger.last_add_confirmed
        return None if end < 0 else await self._at(ledger, end)

    async def size_bytes(self) -> int:
        """Sum of the sizes of the entries.  Raises as `read` does."""
        return 0 if self.ledger_id == NO_LEDGER else (await self._open()).length

    async def entry_count(self) -> int:
        """Number of entries.  Raises as `read` does."""
        return 0 if self.ledger_id == NO_LEDGER else (await self._open()).last_add_confirmed + 1

    async def find_first(self, predicate: Callable[[Entry], bool]) -> Position | None:
        """The first entry for which `predicate` holds, if it holds for all after it; or None.

        Raises as `read` does.
        """
        if self.ledger_id == NO_LEDGER:
            return None
        ledger = await self._open()
        found = await self._search(ledger, predicate)
        if found > ledger.last_add_confirmed:
            return None
        return (await self._at(ledger, found)).position

    async def _find(self, ledger: ReadableLedger, start: Position) -> int:
        if start.ledger_id < 0:
            return 0
        return await self._search(ledger, lambda entry: entry.position >= start)

    async def _search(self, ledger: ReadableLedger, predicate: Callable[[Entry], bool]) -> int:
        low, high = 0, ledger.last_add_confirmed + 1
        while low < high:
            middle = (low + high) // 2
            if predicate(await self._at(ledger, middle)):
                high = middle
            else:
                low = middle + 1
        return low

    async def _at(self, ledger: ReadableLedger, entry_id: int) -> Entry:
        (data,) = await ledger.read(entry_id, entry_id, max_bytes=1)
        return decode_compacted(data)

    async def _open(self) -> ReadableLedger:
        """The handle, opened once for all readers."""
        if self._opening is None:
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(self._ledgers.open(LedgerId(self.ledger_id)))
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except (LedgerError, MetadataError):
            if self._opening is opening:
                self._opening = None
            raise


class StreamCompaction:
    """The compacted ledger of one managed ledger: reading it, and replacing it.

    The record of the stream names every ledger from its creation to its end, so that a crash at any
    step leaves the old or the new compacted ledger, and ledgers that the next load deletes.
    """

    __slots__ = ("_core", "_cursors", "_known", "_run", "_unused", "_work", "horizon", "ledger")

    def __init__(self, core: StreamCore, cursors: StreamCursors) -> None:
        self._core = core
        self._cursors = cursors
        self._work = BackgroundTasks(
            log, failure_event="compacted_ledger_not_deleted", expected=(MagnetarError,)
        )
        self._unused: dict[int, CompactedLedger] = {}
        self._run: WritableLedger | None = None
        self.ledger: CompactedLedger | None = None
        """The present compacted ledger."""
        self.horizon: Position | None = None
        """The last position that it covers; None without one."""

    async def load(self) -> None:
        """Take the state from the record, and clean up after a crash.

        Raises `CorruptRecord`, `MetadataError`, `ManagedLedgerFenced`.
        """
        core = self._core
        found = compacted_of(core.properties) or await self._take_over()
        if found is not None:
            self._adopt(found)
        self._unused = {each: self._made(each) for each in unused_of(core.properties)}
        await self._drop_unused()

    async def _take_over(self) -> Compacted | None:
        """The compacted ledger that Apache Pulsar noted with its cursor, now in our record."""
        core, cursor = self._core, self._cursors.durable.get(COMPACTION_CURSOR)
        ledger_id = NO_LEDGER if cursor is None else cursor.numbers.get(PULSAR_LEDGER, NO_LEDGER)
        if cursor is None or ledger_id < 0:
            return None
        found = Compacted(ledger_id, cursor.mark_delete)
        async with core.lock:
            await core.save(properties=with_compaction(core.properties, found, set()))
        return found

    def _adopt(self, compacted: Compacted | None) -> None:
        """Take over what the record says."""
        if compacted is None:
            self.ledger = self.horizon = None
            return
        self.ledger = self._made(compacted.ledger_id)
        self.horizon = compacted.horizon
        cursor = self._cursors.durable.get(COMPACTION_CURSOR)
        if cursor is not None:
            # Only now, when the ledger is named durably, may older entries go.
            cursor.acknowledge_up_to(compacted.horizon)

    def _made(self, ledger_id: int) -> CompactedLedger:
        return CompactedLedger(self._core.stores.ledgers, ledger_id)

    # Reading

    def use(self) -> CompactedLedger | None:
        """The present compacted ledger, which is not deleted before `leave`."""
        if self.ledger is not None:
            self.ledger.readers += 1
        return self.ledger

    def use_again(self, ledger: CompactedLedger) -> None:
        """Use a ledger that is in use once more."""
        ledger.readers += 1

    def leave(self, ledger: CompactedLedger) -> None:
        """End a `use`."""
        ledger.readers -= 1
        if not ledger.readers and ledger.ledger_id in self._unused:
            self._work.start(self._drop_unused())

    async def find_first(self, predicate: Callable[[Entry], bool]) -> Position | None:
        """See `CompactedLedger.find_first`; None without a compacted ledger."""
        ledger = self.use()
        if ledger is None:
            return None
        try:
            return await ledger.find_first(predicate)
        finally:
            self.leave(ledger)

    # Replacing

    async def begin(self) -> WritableLedger:
        """A new ledger for `commit` or `abandon`; what another `begin` made cannot be committed.

        Raises `LedgerError`, `MetadataError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`, and
        `CursorNotFound` without the cursor of compaction.
        """
        core = self._core
        self._require_cursor()
        core.require_running()
        made_ms = core.stores.clock.now_ms()
        ledger = await core.stores.create_ledger(core.name)
        ledger_id = int(ledger.ledger_id)
        async with core.lock:
            if not core.stores.may_name(made_ms):
                await core.stores.delete_ledger(ledger_id)
                raise LedgerError(
                    f"Ledger {ledger_id} for the compaction of {core.name} took too long to make: "
                    "compact again, and look at the bookies."
                )
            self._unused[ledger_id] = self._made(ledger_id)
            await self._save()
        self._run = ledger
        return ledger

    async def commit(self, ledger: WritableLedger, horizon: Position, *, empty: bool) -> None:
        """Make a closed ledger the compacted one, up to `horizon`; `empty`: it has no entry.

        Raises as `begin`.
        """
        core, ledger_id = self._core, int(ledger.ledger_id)
        async with core.lock:
            self._require_cursor()
            if self._run is not ledger:
                raise CursorNotFound(
                    f"The compaction of {core.name} was given up while it ran: compact again."
                )
            found = Compacted(NO_LEDGER if empty else ledger_id, horizon)
            before = self.ledger
            unused = {**self._unused}
            if not empty:
                del unused[ledger_id]
            if before is not None and before.ledger_id != NO_LEDGER:
                unused[before.ledger_id] = before
            await core.save(properties=with_compaction(core.properties, found, set(unused)))
            self._unused = unused
            self._run = None
            self._adopt(found)
        await self._drop_unused()

    async def abandon(self, ledger: WritableLedger) -> None:
        """Delete a ledger that `begin` made.  Raises as `begin`; the next load deletes it then."""
        if self._run is ledger:
            self._run = None
        await self._drop_unused()

    async def drop(self) -> None:
        """Give up the compacted ledger, and a run.  Raises as `begin`."""
        core = self._core
        async with core.lock:
            self._run = None
            if self.ledger is not None:
                unused = {**self._unused}
                if self.ledger.ledger_id != NO_LEDGER:
                    unused[self.ledger.ledger_id] = self.ledger
                await core.save(properties=with_compaction(core.properties, None, set(unused)))
                self._unused = unused
                self._adopt(None)
        await self._drop_unused()

    def _require_cursor(self) -> None:
        if COMPACTION_CURSOR not in self._cursors.durable:
            raise CursorNotFound(
                f"Managed ledger {self._core.name} has no cursor {COMPACTION_CURSOR!r} any more: "
                "compact again."
            )

    async def _drop_unused(self) -> None:
        """Delete the ledgers that no run writes and no reader reads."""
        core = self._core
        async with core.lock:
            running = None if self._run is None else int(self._run.ledger_id)
            gone = [
                ledger_id
                for ledger_id, ledger in self._unused.items()
                if not ledger.readers and ledger_id != running
            ]
            if not gone:
                return
            before = self._unused
            self._unused = {key: each for key, each in before.items() if key not in gone}
            try:
                await self._save()
            except BaseException:
                self._unused = before
                raise
            core.discard(gone)
        await core.collect()

    async def _save(self) -> None:
        core = self._core
        found = compacted_of(core.properties)
        await core.save(properties=with_compaction(core.properties, found, set(self._unused)))

    async def stop(self) -> None:
        """Wait for deletions in progress."""
        await self._work.wait()
