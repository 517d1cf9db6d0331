"""Handles on ledgers of the embedded store: the one that writes, and those that only read."""

import asyncio
from collections.abc import Awaitable, Callable

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.local.codec import crc32c
from storage.ledger.local.disk import Disk
from storage.ledger.local.entry_reader import EntryReader, Stretches
from storage.ledger.local.ledger_records import StoredRecord
from storage.ledger.local.log_files import LogFile, LogFiles
from storage.ledger.local.writer import Append, LogWriter
from storage.ledger.store import (
    AppendCallback,
    CorruptEntry,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    NoSuchEntry,
    NoSuchLedger,
    ReadableLedger,
    WritableLedger,
    entry_too_large,
)


class LedgerCell:
    """State that all handles of one ledger share.

    `deleted` tells them that the ledger was deleted; `lock` lets one call at a time open, close or
    delete it.
    """

    __slots__ = ("__weakref__", "deleted", "ledger_id", "lock", "stretches")

    def __init__(self, ledger_id: LedgerId) -> None:
        self.ledger_id = ledger_id
        self.deleted = False
        self.lock = asyncio.Lock()
        self.stretches: Stretches | None = None


class EntrySource:
    """Reads entries of any ledger, in threads beside the loop."""

    def __init__(self, disk: Disk, files: LogFiles, on_lost: Callable[[int, int], None]) -> None:
        """`on_lost` is called with ledger and entry id of an entry that does not verify."""
        self._disk = disk
        self._on_lost = on_lost
        self._files = files
        self.closed = False

    async def read(self, cell: LedgerCell, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries first..last, at least one, else no more than `max_bytes` of them."""
        moved: OSError | None = None
        for _ in range(bounds.LEDGER_READ_ATTEMPTS):
            if self.closed:
                raise store_closed()
            if cell.deleted:
                raise no_such_ledger(cell.ledger_id)
            memory, sealed = self._files.memory, self._files.sealed

            def job(
                memory: tuple[LogFile, ...] = memory, sealed: tuple[LogFile, ...] = sealed
            ) -> list[bytes]:
                stretches = self._stretches(cell, sealed)
                reader = EntryReader(self._disk, cell.ledger_id, memory, stretches)
                return reader.read(first, last, max_bytes)

            try:
                return await self._disk.read(job)
            except FileNotFoundError as error:
                # Compaction moved the entries to another file: try again with the new list.
                moved = error
            except OSError as error:
                raise self._failed(cell, error) from error
            except CorruptEntry:
                if cell.deleted:
                    raise no_such_ledger(cell.ledger_id) from None
                self._on_lost(cell.ledger_id, first)
                raise
        raise self._failed(cell, moved) from moved

    async def end_of(self, cell: LedgerCell) -> tuple[int, int]:
        """Last entry id and length in bytes of a ledger, as found in the log."""
        files = self._files.sealed + self._files.memory

        def job() -> tuple[int, int]:
            stretches = Stretches(self._disk, cell.ledger_id, files)
            return stretches.last(), stretches.payload_bytes()

        try:
            return await self._disk.read(job)
        except OSError as error:
            raise self._failed(cell, error) from error

    def _stretches(self, cell: LedgerCell, sealed: tuple[LogFile, ...]) -> Stretches:
        """Job side: where the ledger lies in sealed files; computed once for each set of files."""
        known = cell.stretches
        if known is None or known.files is not sealed:
            known = cell.stretches = Stretches(self._disk, cell.ledger_id, sealed)
        return known

    @staticmethod
    def _failed(cell: LedgerCell, error: OSError | None) -> LedgerError:
        return LedgerError(
            f"Reading ledger {cell.ledger_id} failed: {error}. Check the disk and the kernel's "
            "log, then retry."
        )


def no_such_ledger(ledger_id: int) -> NoSuchLedger:
    """The error for an id without a record."""
    return NoSuchLedger(
        f"Ledger {ledger_id} does not exist or was deleted: reload the topic that names it."
    )


def store_closed() -> LedgerClosed:
    """The error for calls after `close`."""
    return LedgerClosed("The ledger store is closed because the broker is stopping: reconnect.")


class _LocalLedger(ReadableLedger):
    """Reading, which all kinds of handles share."""

    __slots__ = ("_cell", "_source")

    def __init__(self, cell: LedgerCell, source: EntrySource) -> None:
        self._cell = cell
        self._source = source

    @property
    def ledger_id(self) -> LedgerId:
        """The id of the ledger."""
        return self._cell.ledger_id

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        """See `ReadableLedger`."""
        if self._cell.deleted:
            raise no_such_ledger(self._cell.ledger_id)
        if not 0 <= first <= last <= self.last_add_confirmed:
            raise NoSuchEntry(
                f"Entries {first} to {last} of ledger {self.ledger_id} are not readable, its last "
                f"add confirmed is {self.last_add_confirmed}: read within that."
            )
        return await self._source.read(self._cell, first, last, max_bytes)


class LocalReadableLedger(_LocalLedger):
    """A ledger that does not change any more."""

    __slots__ = ("_last_entry_id", "_length")

    def __init__(
        self, cell: LedgerCell, source: EntrySource, last_entry_id: int, length: int
    ) -> None:
        super().__init__(cell, source)
        self._last_entry_id = last_entry_id
        self._length = length

    @property
    def last_add_confirmed(self) -> int:
        """The id of the last entry."""
        return self._last_entry_id

    @property
    def length(self) -> int:
        """The size of the entries in bytes."""
        return self._length


class LocalWritableLedger(_LocalLedger, WritableLedger):
    """A ledger made by this process, and the `Appender` of its entries."""

    __slots__ = (
        "_close",
        "_confirmed",
        "_dead",
        "_failed",
        "_length",
        "_next",
        "_writer",
        "is_closed",
        "stored",
    )

    def __init__(
        self,
        cell: LedgerCell,
        source: EntrySource,
        writer: LogWriter,
        stored: StoredRecord,
        close: Callable[["LocalWritableLedger"], Awaitable[None]],
    ) -> None:
        """`stored` is its record as it was created; `close` makes the end durable in the record."""
        super().__init__(cell, source)
        self.stored = stored
        self.is_closed = False
        self._writer = writer
        self._close = close
        self._next = 0
        self._confirmed = -1
        self._length = 0
        self._dead: LedgerError | None = None
        self._failed: LedgerError | None = None

    @property
    def cell(self) -> LedgerCell:
        """State that it shares with the other handles of the ledger."""
        return self._cell

    @property
    def last_add_confirmed(self) -> int:
        """The last durable entry."""
        return self._confirmed

    @property
    def length(self) -> int:
        """Bytes of the durable entries."""
        return self._length

    def append(self, entry: bytes, done: AppendCallback) -> int:
        """See `WritableLedger`."""
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)
        if len(entry) > bounds.LEDGER_ENTRY_BYTES:
            raise entry_too_large(len(entry), bounds.LEDGER_ENTRY_BYTES)
        entry_id = self._next
        append = Append(self, entry_id, entry, crc32c(entry), done)
        self._next = entry_id + 1
        if self._failed is None:
            self._writer.add(append)
        else:
            asyncio.get_running_loop().call_soon(done, entry_id, self._failed)
        return entry_id

    def confirm(self, entry_id: int, size: int) -> None:
        """Note that the entry is durable.  For the log writer."""
        self._confirmed = entry_id
        self._length += size

    def fail(self, error: LedgerError) -> None:
        """Note that an entry failed.  For the log writer."""
        if self._failed is None:
            self._failed = error

    async def settle(self) -> None:
        """Return when every append has its outcome.  Call it after appends were stopped."""
        while self._failed is None and self._confirmed + 1 < self._next:
            await self._writer.next_group()

    def stop(self) -> None:
        """Refuse further appends, as the store closes; the ledger stays open in its record."""
        if self._dead is None:
            self._dead = store_closed()

    async def fence(self) -> None:
        """Stop appends for good and wait for the entries that are on their way to the disk."""
        self._dead = LedgerFenced(
            f"Ledger {self.ledger_id} was opened or deleted by another owner: reload the topic."
        )
        withdrawn = self._writer.withdraw(self)
        while self._writer.is_writing(self):
            await self._writer.next_group()
        if withdrawn:
            self.fail(self._dead)
            self._writer.call_back(withdrawn, self._dead)

    async def close(self) -> None:
        """See `WritableLedger`.  Raises `LedgerFenced` if another owner ended it elsewhere."""
        if self._dead is None:
            self._dead = LedgerClosed(
                f"Ledger {self.ledger_id} is closed: append to the current one."
            )
        await self.settle()
        await self._close(self)


class LiveLedger(_LocalLedger):
    """A ledger that is being written: readable up to its writer's current last add confirmed."""

    __slots__ = ("_writer",)

    def __init__(self, cell: LedgerCell, source: EntrySource, writer: LocalWritableLedger) -> None:
        super().__init__(cell, source)
        self._writer = writer

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that is durable now."""
        return self._writer.last_add_confirmed

    @property
    def length(self) -> int:
        """Bytes of the entries that are durable now."""
        return self._writer.length
