"""`BookKeeperLedgerStore`: the ledger store on Apache BookKeeper."""

import asyncio
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from weakref import WeakValueDictionary

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.clock import Clock
from storage.ledger.bookkeeper.bookie_client import BookieClient, BookieCounters
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ensemble_change import taken_over
from storage.ledger.bookkeeper.ledger_metadata import (
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.ledger_recovery import LedgerRecovery
from storage.ledger.bookkeeper.ledger_services import (
    LedgerCell,
    LedgerCounters,
    LedgerServices,
    store_closed,
)
from storage.ledger.bookkeeper.metadata_format import UnreadableRecord
from storage.ledger.bookkeeper.metadata_store import (
    LedgerMetadataConflict,
    LedgerMetadataStore,
    VersionedMetadata,
)
from storage.ledger.bookkeeper.readable_ledger import (
    BookKeeperReadableLedger,
    LiveLedger,
    open_unrecovered,
)
from storage.ledger.bookkeeper.wire import ADD_HEAD_BYTES
from storage.ledger.bookkeeper.writable_ledger import BookKeeperWritableLedger
from storage.ledger.store import (
    Copies,
    LedgerDescription,
    LedgerError,
    LedgerStore,
    ReadableLedger,
    WritableLedger,
)


@dataclass(frozen=True, slots=True)
class BookKeeperOptions:
    """Options of new ledgers; `frame_bytes` is nettyMaxFrameSizeBytes of the bookies."""

    copies: Copies = Copies()  # noqa: RUF009 - it is immutable
    """Those of ledgers that are made without a number of their own."""
    digest_type: DigestType = DigestType.CRC32C
    password: bytes = b""
    frame_bytes: int = bounds.BOOKIE_FRAME_BYTES


class BookKeeperLedgerStore(LedgerStore):
    """`LedgerStore` on Apache BookKeeper: creates, opens, recovers and deletes ledgers.

    Call `start` before anything else.  Closing it closes `metadata` and `bookies` too.  A handle of
    a ledger that another process deleted fails when its entries cannot be read any more.
    """

    def __init__(
        self,
        metadata: LedgerMetadataStore,
        bookies: BookieClient,
        clock: Clock,
        rng: random.Random,
        options: BookKeeperOptions,
    ) -> None:
        self._services = LedgerServices(metadata, bookies, rng)
        self._clock = clock
        self._options = options
        digest = Digest(options.digest_type, options.password)
        self._max_entry_bytes = options.frame_bytes - ADD_HEAD_BYTES - digest.overhead_bytes
        self._cells: WeakValueDictionary[int, LedgerCell] = WeakValueDictionary()
        self._writers: dict[int, BookKeeperWritableLedger] = {}

    @property
    def counters(self) -> LedgerCounters:
        """Counters of ledgers since the store was made."""
        return self._services.counters

    @property
    def bookie_counters(self) -> BookieCounters:
        """Counters of its connections to bookies."""
        return self._services.bookies.counters

    async def start(self) -> None:
        """Return when records and the list of bookies can be read.  Raises `LedgerError`."""
        await self._services.metadata.start()

    @property
    def max_entry_bytes(self) -> int:
        """See `LedgerStore`: the largest entry that fits into a frame."""
        return self._max_entry_bytes

    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        """See `LedgerStore`.  Raises `NotEnoughBookies`."""
        self._refuse_if_closed()
        options, services = self._options, self._services
        copies = copies or options.copies
        bookies = services.choose_ensemble(copies.ensemble_size, copies.write_quorum)
        metadata = LedgerMetadata(
            ensemble_size=copies.ensemble_size,
            write_quorum=copies.write_quorum,
            ack_quorum=copies.ack_quorum,
            ensembles=(Ensemble(0, bookies),),
            digest_type=options.digest_type,
            password=options.password,
            custom=dict(custom),
            ctime_ms=self._clock.now_ms(),
        )
        for _ in range(bounds.LEDGER_ID_TRIES):
            ledger_id = await services.metadata.next_ledger_id()
            # Q1: before any entry, as bookies delete entries of ledgers without a record.  An id
            # that another client took is left to it.
            try:
                record = await services.metadata.create(ledger_id, metadata)
            except LedgerMetadataConflict:
                continue
            return self._writable(ledger_id, record)
        raise LedgerError(
            f"{bounds.LEDGER_ID_TRIES} ledger ids in a row were taken already: check that all "
            "clients of these bookies draw their ids from the same place."
        )

    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        cell, services = self._cell(ledger_id), self._services
        async with cell.lock:
            record = await services.metadata.read(ledger_id)
            if record.metadata.state is not LedgerState.CLOSED:
                writer = self._writers.get(ledger_id)
                # A writer of this process ends first, with some time for its entries in flight.
                if writer is not None:
                    await writer.stop(taken_over(ledger_id))
                    record = await services.metadata.read(ledger_id)
                recovery = LedgerRecovery(services, ledger_id, record.metadata)
                record = await recovery.run(record)
            writer = self._writers.pop(ledger_id, None)
            if writer is not None and record.metadata.state is LedgerState.CLOSED:
                await writer.stop(taken_over(ledger_id))
            return self._closed_ledger(cell, record.metadata)

    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        """See `LedgerStore`.  The newest entry of a writer elsewhere may not be readable yet."""
        self._refuse_if_closed()
        cell = self._cell(ledger_id)
        metadata = (await self._services.metadata.read(ledger_id)).metadata
        if metadata.state is LedgerState.CLOSED:
            return self._closed_ledger(cell, metadata)
        writer = self._writers.get(ledger_id)
        if writer is not None:
            return LiveLedger(self._services, cell, writer)
        return await open_unrecovered(self._services, cell, metadata)

    async def delete(self, ledger_id: LedgerId) -> None:
        """See `LedgerStore`.  Bookies give the space back at their next garbage collection."""
        self._refuse_if_closed()
        cell = self._cell(ledger_id)
        async with cell.lock:
            await self._services.metadata.delete(ledger_id)
            cell.deleted = True
            writer = self._writers.pop(ledger_id, None)
            if writer is not None:
                writer.abandon(taken_over(ledger_id))

    async def list_ledgers(self) -> list[LedgerId]:
        """See `LedgerStore`."""
        self._refuse_if_closed()
        return await self._services.metadata.list_ledgers()

    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        """See `LedgerStore`.  Empty if the record cannot be decoded."""
        self._refuse_if_closed()
        try:
            metadata = (await self._services.metadata.read(ledger_id)).metadata
        except UnreadableRecord:
            return LedgerDescription({}, None)
        return LedgerDescription(metadata.custom, metadata.ctime_ms, metadata.text)

    async def close(self) -> None:
        """See `LedgerStore`.  Ledgers that are open stay open; the next `open` recovers them."""
        services = self._services
        if services.closed:
            return
        services.closed = True
        writers = list(self._writers.values())
        async with AsyncExitStack() as closers:  # they run also if this call is cancelled
            closers.push_async_callback(services.metadata.close)
            closers.push_async_callback(services.bookies.close)
            stopped = await asyncio.gather(
                *(writer.stop(store_closed()) for writer in writers), return_exceptions=True
            )
            self._writers.clear()
        for outcome in stopped:
            if outcome is not None:
                raise outcome

    def _refuse_if_closed(self) -> None:
        if self._services.closed:
            raise store_closed()

    def _cell(self, ledger_id: LedgerId) -> LedgerCell:
        cell = self._cells.get(ledger_id)
        if cell is None:
            cell = self._cells[ledger_id] = LedgerCell(ledger_id)
        return cell

    def _writable(self, ledger_id: LedgerId, record: VersionedMetadata) -> BookKeeperWritableLedger:
        writer = BookKeeperWritableLedger(
            self._services, self._cell(ledger_id), record, self._max_entry_bytes, self._writer_ended
        )
        self._writers[ledger_id] = writer
        return writer

    def _writer_ended(self, writer: BookKeeperWritableLedger) -> None:
        self._writers.pop(writer.ledger_id, None)

    def _closed_ledger(
        self, cell: LedgerCell, metadata: LedgerMetadata
    ) -> BookKeeperReadableLedger:
        return BookKeeperReadableLedger(
            self._services, cell, metadata, metadata.last_entry_id, metadata.length
        )
