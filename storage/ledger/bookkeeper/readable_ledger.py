"""Handles that read ledgers from bookies."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import DigestMismatch, OpenedEntry
from storage.ledger.bookkeeper.ledger_metadata import LedgerMetadata, LedgerState
from storage.ledger.bookkeeper.ledger_services import (
    EntrySeal,
    LedgerCell,
    LedgerServices,
    no_such_ledger,
    store_closed,
)
from storage.ledger.bookkeeper.reads import (
    LastConfirmedRead,
    RangeRead,
    ReadBatch,
    ReadEffect,
    ReadFailure,
    ReadOne,
    ReadState,
)
from storage.ledger.store import CorruptEntry, LedgerError, NoSuchEntry, ReadableLedger

_BATCH_ENTRY_OVERHEAD_BYTES = 4
"""Bytes of the size field before each entry of a batch."""


class _RangeReader:
    """Carries out one `RangeRead` with bookies."""

    __slots__ = ("_done", "_machine", "_seal", "_services")

    def __init__(self, services: LedgerServices, seal: EntrySeal, machine: RangeRead) -> None:
        self._services = services
        self._seal = seal
        self._machine = machine
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Return when the read has ended.  A defect is raised as it is."""
        self._perform(self._machine.start())
        await self._done
        self._services.counters.read_retries += self._machine.retries

    def _perform(self, effects: Sequence[ReadEffect]) -> None:
        bookies, ledger_id = self._services.bookies, self._seal.ledger_id
        for effect in effects:
            if isinstance(effect, ReadOne):
                entry_id, done = effect.entry_id, partial(self._entry_done, effect)
                bookies.read(effect.bookie, ledger_id, entry_id, done)
            else:
                bookies.read_batch(
                    effect.bookie,
                    ledger_id,
                    effect.first,
                    effect.max_entries,
                    effect.max_bytes,
                    partial(self._batch_done, effect),
                )
        if self._machine.state is not ReadState.READING and not self._done.done():
            self._done.set_result(None)

    def _entry_done(self, request: ReadOne, code: ReplyCode, body: bytes) -> None:
        if not self._done.done():
            self._fail_on_error(partial(self._take_entry, request, code, body))

    def _batch_done(self, request: ReadBatch, code: ReplyCode, bodies: Sequence[bytes]) -> None:
        if not self._done.done():
            self._fail_on_error(partial(self._take_batch, request, code, bodies))

    def _fail_on_error(self, take: Callable[[], None]) -> None:
        """Call `take`; an error in it ends the read, which would wait for ever otherwise."""
        try:
            take()
        except Exception as error:  # noqa: BLE001 - raised in `run`
            if not self._done.done():
                self._done.set_exception(error)

    def _take_entry(self, request: ReadOne, code: ReplyCode, body: bytes) -> None:
        found: OpenedEntry | None = None
        if code is ReplyCode.OK:
            found = self._open(body, request.entry_id)
        self._perform(self._machine.entry_replied(request, code, found))

    def _take_batch(self, request: ReadBatch, code: ReplyCode, bodies: Sequence[bytes]) -> None:
        found: list[OpenedEntry] = []
        if code is ReplyCode.OK:
            for place, body in enumerate(bodies):
                entry = self._open(body, request.first + place)
                if entry is None:
                    break
                found.append(entry)
        self._perform(self._machine.batch_replied(request, code, found))

    def _open(self, body: bytes, entry_id: int) -> OpenedEntry | None:
        # Q27: then the next replica is read, as after a failure.
        try:
            return self._seal.digest.open(body, self._seal.ledger_id, entry_id)
        except DigestMismatch:
            return None


class BookKeeperLedger(ReadableLedger):
    """Reading, which all kinds of handles share."""

    def __init__(
        self, services: LedgerServices, cell: LedgerCell, metadata: LedgerMetadata
    ) -> None:
        self._services = services
        self._cell = cell
        self._seal = EntrySeal(cell.ledger_id, metadata)
        self._batches = True

    @property
    def ledger_id(self) -> LedgerId:
        """The id of the ledger."""
        return self._cell.ledger_id

    @property
    @abstractmethod
    def metadata(self) -> LedgerMetadata:
        """The record as it was written or read last."""

    @abstractmethod
    def _adopt(self, metadata: LedgerMetadata) -> None:
        """Take the record as it was read just now."""

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        """See `ReadableLedger`."""
        self._require_usable()
        if not 0 <= first <= last <= self.last_add_confirmed:
            raise NoSuchEntry(
                f"Entries {first} to {last} of ledger {self.ledger_id} are not readable, its last "
                f"add confirmed is {self.last_add_confirmed}: read within that."
            )
        tried = await self._try(self.metadata, first, last, max_bytes)
        if tried.failure is None:
            return tried.entries
        self._require_usable()
        # Q28: another client may have moved the entries, or deleted the ledger.
        stored = (await self._services.metadata.read(self.ledger_id)).metadata
        self._adopt(stored)
        tried = await self._try(stored, first, last, max_bytes)
        if tried.failure is None:
            return tried.entries
        self._require_usable()
        raise self._failed(tried, tried.failure)

    async def _try(
        self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int
    ) -> RangeRead:
        confirmed = self.last_add_confirmed + 1
        machine = RangeRead(
            metadata,
            first,
            last,
            max_bytes,
            mean_bytes=self.length // max(confirmed, 1),
            overhead_bytes=self._seal.digest.overhead_bytes + _BATCH_ENTRY_OVERHEAD_BYTES,
            batches=self._batches,
        )
        await _RangeReader(self._services, self._seal, machine).run()
        if machine.batches_refused:
            self._batches = False
        return machine

    def _require_usable(self) -> None:
        if self._services.closed:
            raise store_closed()
        if self._cell.deleted:
            raise no_such_ledger(self.ledger_id)

    def _failed(self, tried: RangeRead, failure: ReadFailure) -> LedgerError:
        kind = CorruptEntry if failure is ReadFailure.DAMAGED else LedgerError
        return kind(
            f"Entry {tried.failed_entry_id} of ledger {self.ledger_id} cannot be read, "
            f"{failure.value}: look at the bookies of its ensemble, then read again."
        )


class BookKeeperReadableLedger(BookKeeperLedger):
    """A ledger that is closed, or was opened without disturbing its writer."""

    def __init__(
        self,
        services: LedgerServices,
        cell: LedgerCell,
        metadata: LedgerMetadata,
        last_add_confirmed: int,
        length: int,
    ) -> None:
        super().__init__(services, cell, metadata)
        self._metadata = metadata
        self._last_add_confirmed = last_add_confirmed
        self._length = length

    @property
    def metadata(self) -> LedgerMetadata:
        """The record as it was read last."""
        return self._metadata

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that may be read."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """Bytes up to that entry."""
        return self._length

    def _adopt(self, metadata: LedgerMetadata) -> None:
        self._metadata = metadata
        # Another client may have closed it meanwhile: its end is what may be read.
        if metadata.state is LedgerState.CLOSED:
            self._last_add_confirmed = metadata.last_entry_id
            self._length = metadata.length


class LiveLedger(BookKeeperLedger):
    """A ledger that is being written: readable up to its writer's current last add confirmed."""

    def __init__(
        self, services: LedgerServices, cell: LedgerCell, writer: BookKeeperLedger
    ) -> None:
        super().__init__(services, cell, writer.metadata)
        self._writer = writer

    @property
    def metadata(self) -> LedgerMetadata:
        """The record as the writer knows it."""
        return self._writer.metadata

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that may be read by now."""
        return self._writer.last_add_confirmed

    @property
    def length(self) -> int:
        """Bytes up to that entry."""
        return self._writer.length

    def _adopt(self, metadata: LedgerMetadata) -> None:
        """Do nothing: the writer has its own record."""


class LastConfirmedQuery:
    """Reads the last add confirmed of a ledger from its last ensemble, without fencing it."""

    def __init__(
        self, services: LedgerServices, ledger_id: LedgerId, metadata: LedgerMetadata
    ) -> None:
        self._services = services
        self._seal = EntrySeal(ledger_id, metadata)
        self._machine = LastConfirmedRead(metadata)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self) -> tuple[int, OpenedEntry | None]:
        """The last add confirmed, and the entry that has it.

        Raises `LedgerError`; a defect is raised as it is.
        """
        ledger_id = self._seal.ledger_id
        for request in self._machine.start():
            done = partial(self._replied, request)
            self._services.bookies.read(request.bookie, ledger_id, request.entry_id, done)
        await self._done
        if self._machine.state is ReadState.FAILED:
            raise LedgerError(
                f"Ledger {ledger_id} cannot be opened now, too few of its bookies answer: open it "
                "again when they are back."
            )
        return self._machine.last_confirmed, self._machine.newest

    def _replied(self, request: ReadOne, code: ReplyCode, body: bytes) -> None:
        """Take an answer; an error in it ends the query, which would wait for ever otherwise."""
        if self._done.done():
            return
        try:
            self._take(request, code, body)
        except Exception as error:  # noqa: BLE001 - raised in `ask`
            self._done.set_exception(error)

    def _take(self, request: ReadOne, code: ReplyCode, body: bytes) -> None:
        found: OpenedEntry | None = None
        if code is ReplyCode.OK:
            try:
                found = self._seal.digest.open(body, self._seal.ledger_id, None)
            except DigestMismatch:
                self._services.counters.read_retries += 1
        self._machine.replied(request, code, found)
        if self._machine.state is not ReadState.READING:
            self._done.set_result(None)


async def open_unrecovered(
    services: LedgerServices, cell: LedgerCell, metadata: LedgerMetadata
) -> BookKeeperReadableLedger:
    """A handle up to the last add confirmed that bookies know.

    Raises as `LastConfirmedQuery.ask`.
    """
    last, newest = await LastConfirmedQuery(services, cell.ledger_id, metadata).ask()
    if newest is not None and newest.entry_id == last + 1:
        length = newest.length - len(newest.data)
        return BookKeeperReadableLedger(services, cell, metadata, last, length)
    length = 0
    if last >= 0:
        length = await _length_up_to(services, cell, metadata, last)
    return BookKeeperReadableLedger(services, cell, metadata, last, length)


async def _length_up_to(
    services: LedgerServices, cell: LedgerCell, metadata: LedgerMetadata, entry_id: int
) -> int:
    """The length in the header of an entry."""
    seal = EntrySeal(cell.ledger_id, metadata)
    bookies = metadata.ensemble_of(entry_id).bookies
    for place in metadata.write_set(entry_id):
        answer: asyncio.Future[tuple[ReplyCode, bytes]] = asyncio.get_running_loop().create_future()

        def done(
            code: ReplyCode,
            body: bytes,
            answer: asyncio.Future[tuple[ReplyCode, bytes]] = answer,
        ) -> None:
            if not answer.done():
                answer.set_result((code, body))

        services.bookies.read(bookies[place], cell.ledger_id, entry_id, done)
        code, body = await answer
        if code is not ReplyCode.OK:
            continue
        try:
            return seal.digest.open(body, cell.ledger_id, entry_id).length
        except DigestMismatch:
            services.counters.read_retries += 1
    raise LedgerError(
        f"Entry {entry_id} of ledger {cell.ledger_id} cannot be read, and with it the length of "
        "the ledger: open it again when its bookies are back."
    )
