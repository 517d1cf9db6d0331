"""`LocalLedgerStore`: the embedded ledger store, over one shared log."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from weakref import WeakValueDictionary

import structlog

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.clock import Clock
from storage.damage import DamageKind, DamagePolicy, DamageReport, EntryRange
from storage.durable_mark import DurableMark
from storage.ledger.local.codec import LogFormatError
from storage.ledger.local.disk import Disk, ledger_error
from storage.ledger.local.inspection import Inspection, count_above, inspect
from storage.ledger.local.ledger_records import (
    LedgerRecord,
    LedgerRecords,
    LedgerState,
    StoredRecord,
    stream_of,
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
from storage.ledger.local.log_listing import LogListing
from storage.ledger.local.reclaim import DeletionGuard, Reclaim, ReclaimReport, unguarded
from storage.ledger.local.recovery import recover
from storage.ledger.local.sealing import Sealer
from storage.ledger.local.verification import Verifier
from storage.ledger.local.writer import LogWriter
from storage.ledger.store import (
    ONE_COPY,
    Copies,
    LedgerDescription,
    LedgerError,
    LedgerFenced,
    LedgersDamaged,
    LedgerStore,
    ReadableLedger,
    WritableLedger,
)
from storage.metadata.store import MetadataError, MetadataStore, VersionConflict

_log = structlog.get_logger(__name__)


def _require_metadata(max_ledger: int, last_id: int | None) -> None:
    """Raise `LedgerError` if the log has entries and the metadata store never gave out an id."""
    if max_ledger >= 0 and last_id is None:
        raise LedgerError(
            f"The log has entries of ledger {max_ledger}, and the metadata store never "
            "gave out an id: restore the metadata that belongs to this log."
        )


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
        damage: DamageReport | None = None,
        mark: DurableMark | None = None,
    ) -> None:
        """Make a store that is not started.

        `guard` is entered before files are removed; `rng` makes the nonces of log files; `mark`
        gets the number of the newest log file and its durable length.
        """
        self._mark = mark
        self._marked = 0 if mark is None else mark.values[0]
        self.damage = damage or DamageReport()
        """The damage that was found, and the operator's choice."""
        self.lost_records: str | None = None
        """A sentence about entries of ledgers that the metadata store does not know, if any."""
        limits = limits or LedgerLimits()
        rng = rng or random.SystemRandom()
        self._disk = disk
        self._clock = clock
        self._records = LedgerRecords(metadata)
        self._files = LogFiles()
        self._listing = LogListing(metadata)
        self._listing_changed = asyncio.Event()
        self._lister: asyncio.Task[None] | None = None
        self._reclaim = Reclaim(
            disk,
            self._files,
            self._records,
            limits,
            rng,
            guard,
            self.damage,
            self._list_files,
            self._entry_lost,
        )
        self._verifier = Verifier(disk, self._files, limits, self._entry_lost)
        self._sealer = Sealer(disk, self._files, limits, self._reclaim.wake)
        self._writer = LogWriter(disk, self._files, limits, rng, self._sealer.add, self._durable)
        self._source = EntrySource(disk, self._files, self._entry_lost)
        self._streams: dict[int, str] = {}
        self._cells: WeakValueDictionary[int, LedgerCell] = WeakValueDictionary()
        self._writers: dict[int, LocalWritableLedger] = {}
        self._closed = False

    async def start(self) -> None:
        """Recover the log, and compare it with the records.

        Raises `LedgerError` if that cannot be done, `DamagedData` as the operator chose.
        """
        listed = await self._listing.load()
        try:
            stored = await self._records.summaries()
        except MetadataError as error:
            # Nothing is compared then, and nothing may be deleted.
            stored = {}
            self.damage.note(
                DamageKind.METADATA, f"The records of ledgers cannot all be read: {error}"
            )
        try:
            records = {
                ledger_id: each for ledger_id, each in stored.items() if each.stream is not None
            }
            durable = (0, 0) if self._mark is None else self._mark.values
            found = await self._disk.maintain(partial(recover, self._disk, listed, durable))
            last_id = await self._records.last_id()
            _require_metadata(found.max_ledger, last_id)
            inspection = await self._disk.maintain(partial(inspect, self._disk, found, records))
            if last_id is not None and found.max_ledger > last_id:
                count = partial(count_above, self._disk, found, last_id)
                self._note_lost_records(last_id, *await self._disk.maintain(count))
        except OSError as error:
            raise ledger_error(error, "Recovering the ledger log") from error
        self._streams = {each: record.stream or "" for each, record in records.items()}
        self._report(inspection)
        self._files.load(found.sealed, found.memory, found.next_number, found.max_ledger)
        verified = await self._verify_before_start(frozenset(records))
        self.damage.summarize()
        self.damage.require_start()
        for file in found.memory:
            self._writer.follow(file)
            self._sealer.add(file)
        self._listing.missing = inspection.missing
        self._files.on_change = self._listing_changed.set
        self._listing_changed.set()
        self._lister = asyncio.get_running_loop().create_task(self._keep_listing())
        self._reclaim.start([] if self.damage.has_loss else found.superfluous)
        if not verified:
            self._verifier.start(frozenset(records))

    async def leave_out_ids(self, count: int) -> None:
        """Give no ledger an id of the next `count`.  Raises `MetadataError`."""
        await self._records.leave_out(count)

    async def _verify_before_start(self, living: AbstractSet[int]) -> bool:
        """Read everything through if the operator wants no start without what was lost."""
        # A loss that is known already is enough to refuse the start.
        if self.damage.policy is not DamagePolicy.REFUSE_START or self.damage.has_loss:
            return False
        try:
            await self._verifier.run(living)
        except OSError as error:
            raise ledger_error(error, "Verifying the ledger log") from error
        except LogFormatError as error:
            raise LedgerError(f"An index changed while the log was verified ({error}).") from error
        return True

    def _durable(self, number: int, end: int) -> None:
        """Note how far the newest log file is durable."""
        if self._mark is not None:
            self._marked = number
            self._mark.note(number, end)

    def _note_lost_records(self, last_id: int, ledgers: int, entries: int) -> None:
        """Note entries of ledgers above the last id that the metadata store gave out."""
        # Only the lost records said of which topics these ledgers are.
        self.lost_records = (
            f"The log has {entries} entries of {ledgers} ledgers that the metadata store does not "
            f"know, as its newest records were lost: it gave out ids up to {last_id}. No topic "
            "has these messages; the entries stay in the log."
        )
        self.damage.metadata_is_behind = True
        self.damage.note(DamageKind.METADATA, self.lost_records)

    def _report(self, inspection: Inspection) -> None:
        for finding in inspection.findings:
            self.damage.note(finding.kind, finding.sentence, lost=finding.lost)
        for ledger_id, loss in sorted(inspection.losses.items()):
            stream = self._streams.get(ledger_id, "")
            self.damage.note_ledger(ledger_id, stream, loss.missing, end_unknown=loss.end_unknown)

    def _entry_lost(self, ledger_id: int, entry_id: int) -> None:
        """Note an entry that does not verify."""
        stream = self._streams.get(ledger_id)
        if stream is None:
            return  # The ledger was deleted meanwhile, or nobody reads it.
        self.damage.note_ledger(ledger_id, stream, [(entry_id, entry_id)])

    async def _list_files(self) -> None:
        files = [*self._files.sealed, *self._files.memory]
        if self._mark is not None and self._marked not in {file.number for file in files}:
            # The file was given up: a start must not miss it.
            self._marked = 0
            self._mark.note(0)
            await self._disk.maintain(self._mark.sync)
        await self._listing.save(files)

    async def _keep_listing(self) -> None:
        """Keep the list of files in the metadata store, as they come and go."""
        while True:
            await self._listing_changed.wait()
            self._listing_changed.clear()
            try:
                await self._list_files()
            except MetadataError as error:
                # The next change writes it: until then a lost file may not be missed.
                _log.warning("ledger_files_not_listed", error=str(error))

    @property
    def max_entry_bytes(self) -> int:
        """See `LedgerStore`."""
        return bounds.LEDGER_ENTRY_BYTES

    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        """See `LedgerStore`.  There is one copy of each entry."""
        self._refuse_if_closed()
        if copies not in (None, ONE_COPY):
            raise LedgerError(
                f"{copies} cannot be made: the ledgers of a data directory have one copy; ask for "
                "one, or run brokers with bookies."
            )
        record = LedgerRecord(LedgerState.OPEN, self._clock.now_ms(), custom=dict(custom))
        while True:
            ledger_id = await self._records.take_id(above=self._files.max_ledger_at_start)
            try:
                stored = await self._records.create(ledger_id, record)
            except VersionConflict:
                continue
            break
        stream = stream_of(custom)
        if stream is not None:
            self._streams[ledger_id] = stream
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
            self._streams.pop(ledger_id, None)
            self.damage.forget_ledger(ledger_id)
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
        return LedgerDescription(record.custom, record.created_ms, record.text)

    def require_whole(self, stream: str, ledger_ids: Iterable[int]) -> None:
        """See `LedgerStore`."""
        refusal = self.damage.refusal_of(stream, ledger_ids)
        if refusal is not None:
            raise LedgersDamaged(refusal)

    @property
    def keeps_everything(self) -> bool:
        """See `LedgerStore`."""
        # A record that names the ledger may be among those that were lost, whatever was chosen.
        return self.damage.keeps_everything or self.damage.metadata_is_behind

    def missing_entries(self, ledger_id: int) -> Sequence[EntryRange]:
        """See `LedgerStore`."""
        return self.damage.missing_entries(ledger_id)

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
        await self._verifier.close()
        await self._reclaim.close()
        await self._close_listing()
        self._source.closed = True
        await self._disk.close()
        if self._mark is not None:
            self._mark.close()

    async def _close_listing(self) -> None:
        if self._lister is None:
            return
        self._lister.cancel()
        await asyncio.gather(self._lister, return_exceptions=True)
        self._lister = None
        try:
            await self._list_files()
        except MetadataError as error:
            _log.warning("ledger_files_not_listed", error=str(error))

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
