"""`LocalLedgerStore`: the embedded ledger store, over one shared log."""

import random
from collections.abc import Mapping
from functools import partial
from weakref import WeakValueDictionary

import structlog

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.clock import Clock
from storage.ledger.local.disk import Disk, ledger_error
from storage.ledger.local.ledger_records import (
    LedgerRecord,
    LedgerRecords,
    LedgerState,
    StoredRecord,
)
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_ledger import (
    EntrySource,
    LedgerCell,
    LiveLedger,
    LocalReadableLedger,
    LocalWritableLedger,
    no_such_ledger,
    store_closed,
)
from storage.ledger.local.log_files import LogFiles
from storage.ledger.local.reclaim import DeletionGuard, Reclaim, ReclaimReport, unguarded
from storage.ledger.local.recovery import recover
from storage.ledger.local.sealing import Sealer
from storage.ledger.local.writer import LogWriter
from storage.ledger.store import (
    LedgerDescription,
    LedgerError,
    LedgerFenced,
    LedgerStore,
    ReadableLedger,
    WritableLedger,
)
from storage.metadata.store import MetadataError, MetadataStore, VersionConflict

_log = structlog.get_logger(__name__)


class LocalLedgerStore(LedgerStore):
    """`LedgerStore` on files of this machine: all ledgers share one log.

    A ledger is a record in the metadata store and entries in the log.  The record is written first
    and removed first, so entries without a record are garbage, which `Reclaim` drops.  The lock of
    the data directory keeps other processes out.  Call `start` before anything else.
    """

    def __init__(
        self,
        disk: Disk,
        metadata: MetadataStore,
        clock: Clock,
        *,
        limits: LedgerLimits | None = None,
        rng: random.Random | None = None,
        guard: DeletionGuard = unguarded,
    ) -> None:
        """`guard` is entered before files are removed; `rng` makes the nonces of log files."""
        limits = limits or LedgerLimits()
        rng = rng or random.SystemRandom()
        self._disk = disk
        self._clock = clock
        self._records = LedgerRecords(metadata)
        self._files = LogFiles()
        self._reclaim = Reclaim(disk, self._files, self._records, limits, rng, guard)
        self._sealer = Sealer(disk, self._files, limits, self._reclaim.wake)
        self._writer = LogWriter(disk, self._files, limits, rng, self._sealer.add)
        self._source = EntrySource(disk, self._files)
        self._cells: WeakValueDictionary[int, LedgerCell] = WeakValueDictionary()
        self._writers: dict[int, LocalWritableLedger] = {}
        self._closed = False

    async def start(self) -> None:
        """Recover the log.  Raises `LedgerError` if that cannot be done."""
        try:
            found = await self._disk.maintain(partial(recover, self._disk))
        except OSError as error:
            raise ledger_error(error, "Recovering the ledger log") from error
        last_id = await self._records.last_id()
        if found.max_ledger >= 0 and last_id is None:
            raise LedgerError(
                f"The log has entries of ledger {found.max_ledger}, and the metadata store never "
                "gave out an id: restore the metadata that belongs to this log."
            )
        if last_id is not None and found.max_ledger > last_id:
            _log.warning("ledger_log_newer_than_metadata", log=found.max_ledger, metadata=last_id)
        self._files.load(found.sealed, found.memory, found.next_number, found.max_ledger)
        for file in found.memory:
            self._writer.follow(file)
            self._sealer.add(file)
        self._reclaim.start(found.superfluous)

    @property
    def max_entry_bytes(self) -> int:
        """See `LedgerStore`."""
        return bounds.LEDGER_ENTRY_BYTES

    async def create(self, *, custom: Mapping[str, bytes]) -> WritableLedger:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        record = LedgerRecord(LedgerState.OPEN, self._clock.now_ms(), custom=dict(custom))
        while True:
            ledger_id = await self._records.take_id(above=self._files.max_ledger_at_start)
            try:
                stored = await self._records.create(ledger_id, record)
            except VersionConflict:
                continue
            break
        cell = self._cell(ledger_id)
        ledger = LocalWritableLedger(cell, self._source, self._writer, stored, self._close_ledger)
        self._writers[ledger_id] = ledger
        return ledger

    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        cell = self._cell(ledger_id)
        async with cell.lock:
            while True:
                stored = await self._stored(ledger_id)
                if stored.record.state is LedgerState.CLOSED:
                    return self._readable(cell, stored.record)
                try:
                    return self._readable(cell, await self._recover_ledger(cell, stored))
                except VersionConflict:
                    continue

    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        cell = self._cell(ledger_id)
        stored = await self._stored(ledger_id)
        writer = self._writers.get(ledger_id)
        if stored.record.state is LedgerState.CLOSED:
            return self._readable(cell, stored.record)
        if writer is not None:
            return LiveLedger(cell, self._source, writer)
        return LocalReadableLedger(cell, self._source, *await self._source.end_of(cell))

    async def delete(self, ledger_id: LedgerId) -> None:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        cell = self._cell(ledger_id)
        async with cell.lock:
            cell.deleted = True
            try:
                await self._records.delete(ledger_id)
            except MetadataError:
                cell.deleted = False
                raise
            writer = self._writers.pop(ledger_id, None)
            if writer is not None:
                await writer.fence()
        self._reclaim.wake()

    async def list_ledgers(self) -> list[LedgerId]:
        """See `LedgerStore`."""
        return await self._records.list_ids()

    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        """See `LedgerStore`."""
        record = (await self._stored(ledger_id)).record
        return LedgerDescription(record.custom, record.created_ms)

    async def reclaim(self) -> ReclaimReport:
        """Give space back now, rather than at the next pass in the background."""
        self._refuse_if_closed()
        return await self._reclaim.run_once()

    async def close(self) -> None:
        """See `LedgerStore`.  Ledgers that are open stay open; the next `open` recovers them."""
        if self._closed:
            return
        self._closed = True
        for ledger in self._writers.values():
            ledger.stop()
        await self._writer.close()
        await self._sealer.close()
        await self._reclaim.close()
        self._source.closed = True
        await self._disk.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise store_closed()

    def _cell(self, ledger_id: LedgerId) -> LedgerCell:
        cell = self._cells.get(ledger_id)
        if cell is None:
            cell = self._cells[ledger_id] = LedgerCell(ledger_id)
        return cell

    async def _stored(self, ledger_id: LedgerId) -> StoredRecord:
        stored = await self._records.get(ledger_id)
        if stored is None:
            raise no_such_ledger(ledger_id)
        return stored

    def _readable(self, cell: LedgerCell, record: LedgerRecord) -> LocalReadableLedger:
        return LocalReadableLedger(cell, self._source, record.last_entry_id, record.length)

    async def _recover_ledger(self, cell: LedgerCell, stored: StoredRecord) -> LedgerRecord:
        """Fence, find the end, close.  Raises `VersionConflict` if the record changed meanwhile."""
        ledger_id = cell.ledger_id
        record = stored.record.moved(LedgerState.IN_RECOVERY)
        stored = await self._records.update(ledger_id, record, stored.version)
        # No other process can write (the data directory is locked).  A writer of this one is
        # stopped, and its entries that are on their way to the disk are waited for.
        writer = self._writers.get(ledger_id)
        if writer is not None:
            await writer.fence()
            end = writer.last_add_confirmed, writer.length
        else:
            end = await self._source.end_of(cell)
        closed = record.moved(LedgerState.CLOSED, *end)
        await self._records.update(ledger_id, closed, stored.version)
        self._writers.pop(ledger_id, None)
        return closed

    async def _close_ledger(self, ledger: LocalWritableLedger) -> None:
        """Make the end of a ledger durable, when all its appends have their outcome."""
        async with ledger.cell.lock:
            if ledger.is_closed:
                return
            end = ledger.last_add_confirmed, ledger.length
            try:
                closed = ledger.stored.record.moved(LedgerState.CLOSED, *end)
                await self._records.update(ledger.ledger_id, closed, ledger.stored.version)
            except VersionConflict:
                record = (await self._stored(ledger.ledger_id)).record
                theirs = record.last_entry_id, record.length
                if record.state is not LedgerState.CLOSED or theirs != end:
                    raise LedgerFenced(
                        f"Ledger {ledger.ledger_id} was taken over by another owner before it was "
                        "closed: reload the topic."
                    ) from None
            ledger.is_closed = True
            self._writers.pop(ledger.ledger_id, None)
