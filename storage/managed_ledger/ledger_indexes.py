"""The entry indexes of one stream's ledgers: maintained, built, stored and loaded."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from config.bounds import ENTRY_INDEX_READ_ENTRIES, READ_BATCH_BYTES
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import LedgerError
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.entry_index import BrokenIndex, LedgerIndex, Sums, index_key
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class ReadEntries(Protocol):
    """The type of `StreamReader.read`."""

    async def __call__(
        self, start: Position, *, max_entries: int, max_bytes: int, up_to: Position
    ) -> list[Entry]:
        """Entries from `start` to `up_to`."""
        ...


class LedgerIndexes:
    """Gives the entry index of each ledger of one stream; `StreamRanges` adds them up.

    From the first query on, the index of the ledger being written grows with its durable entries.
    When the ledger ends, its index becomes a record of the metadata store, which is deleted with
    the ledger (`Stores.delete_data_ledger`).  A missing index (no query before, a crash, a ledger
    of Apache Pulsar) is built by reading the ledger, once for all callers, and is stored then.
    """

    __slots__ = (
        "_ahead",
        "_building",
        "_core",
        "_live",
        "_live_id",
        "_queried",
        "_read",
        "_saves",
        "_totals",
    )

    def __init__(self, core: StreamCore, read: ReadEntries) -> None:
        self._core = core
        self._read = read
        self._queried = False
        self._live: LedgerIndex | None = None
        self._live_id = -1
        self._totals: dict[int, Sums] = {}
        self._building: dict[int, asyncio.Task[LedgerIndex | None]] = {}
        self._ahead: asyncio.Task[None] | None = None
        self._saves = BackgroundTasks()

    # While it is written

    def appended(self, ledger_id: int, first: int, entries: Sequence[bytes]) -> None:
        """Count entries from `first` on that became durable.

        Entries before them that are not counted are read at the next query.
        """
        # A stream that is never queried costs its producers nothing.
        if not self._queried:
            return
        live = self._live
        if live is None or self._live_id != ledger_id:
            self.ledgers_changed()  # the one before has ended
            live = self._live = LedgerIndex()
            self._live_id = ledger_id
        if live.entries == first:
            live.add(entries)

    def ledgers_changed(self) -> None:
        """Store the index of a ledger that ended; forget the sums of ledgers that were dropped."""
        ledgers = self._core.ledgers
        for ledger_id in [each for each in self._totals if ledgers.get(each) is None]:
            del self._totals[ledger_id]
        live, ledger_id = self._live, self._live_id
        info = ledgers.get(ledger_id)
        if live is None or (info is not None and not info.closed_ms):
            return
        self._live, self._live_id = None, -1
        if info is not None and live.entries == info.entries:
            self._complete(info, live)
            self._save(ledger_id, live)

    # Queries

    async def of(self, ledger_id: int) -> LedgerIndex | None:
        """The index of a ledger, over all entries that are readable now; None if it is gone.

        Raises as `StreamReader.read`.
        """
        self._queried = True
        info = self._core.ledgers.get(ledger_id)
        if info is None:
            return None
        index = self._known(ledger_id)
        if index is not None and index.entries >= info.entries:
            return index
        building = self._building.get(ledger_id)
        if building is None:
            building = self._core.loop.create_task(self._build(ledger_id))
            self._building[ledger_id] = building
            building.add_done_callback(lambda done: self._built(ledger_id, done))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            if building.cancelled():
                raise self._core.stopped_error() from None
            raise

    def _built(self, ledger_id: int, building: "asyncio.Task[LedgerIndex | None]") -> None:
        self._building.pop(ledger_id, None)
        if not building.cancelled():
            building.exception()  # callers may all be cancelled: then asyncio would complain

    async def totals(self, info: LedgerInfo) -> Sums:
        """Sums over all entries of a ledger; zero if it is gone."""
        known = self._totals.get(info.ledger_id)
        if known is not None:
            return known
        index = await self.of(info.ledger_id)
        return Sums() if index is None else index.sums(0, index.block_count)

    def known_totals(self, info: LedgerInfo) -> Sums | None:
        """Sums over all entries of a ledger if they are in memory, else None."""
        return self._totals.get(info.ledger_id)

    def look_ahead(self, first: int) -> asyncio.Task[None]:
        """Start to get the totals of all ledgers from that one on; the task runs to its end."""
        if self._ahead is None:
            self._ahead = self._start(partial(self._go_ahead, first), "entry_indexes_not_made")
            self._ahead.add_done_callback(self._ahead_ended)
        return self._ahead

    def _ahead_ended(self, _: "asyncio.Task[None]") -> None:
        self._ahead = None

    async def _go_ahead(self, first: int) -> None:
        for info in [each for each in self._core.ledgers.infos if each.ledger_id >= first]:
            await self.totals(info)

    # Building, storing, loading

    def _known(self, ledger_id: int) -> LedgerIndex | None:
        if ledger_id == self._live_id:
            return self._live
        return self._core.stores.indexes.get(ledger_id)

    def _complete(self, info: LedgerInfo, index: LedgerIndex) -> None:
        self._totals[info.ledger_id] = index.sums(0, index.block_count)
        self._core.stores.indexes.keep(info.ledger_id, index)

    async def _build(self, ledger_id: int) -> LedgerIndex | None:
        """Load the index, or read the entries that it lacks."""
        core = self._core
        index = self._known(ledger_id) or await self._load(ledger_id)
        stored = index is not None
        async with core.stores.index_builds:
            if index is None:
                index = LedgerIndex()
            info = core.ledgers.get(ledger_id)
            if info is not None and not info.closed_ms:
                self._live, self._live_id = index, ledger_id
            while info is not None and index.entries < info.entries:
                stored = False
                if not await self._read_on(ledger_id, index, info.last):
                    info = core.ledgers.get(ledger_id)
                    break
                await asyncio.sleep(0)  # reading from the cache does not wait for anything
                info = core.ledgers.get(ledger_id)
        if info is None:
            return None
        if index.entries < info.entries:
            raise LedgerError(
                f"Ledger {ledger_id} of {core.name} has {info.entries} entries, and after "
                f"{index.entries} nothing more is read: check the ledger store."
            )
        if info.closed_ms and index.entries == info.entries:
            self._complete(info, index)
            if not stored:
                self._save(ledger_id, index)
        return index

    async def _read_on(self, ledger_id: int, index: LedgerIndex, last: Position) -> bool:
        """Read and count one piece; False if the ledger was trimmed meanwhile."""
        entries = await self._read(
            Position(ledger_id, index.entries),
            max_entries=ENTRY_INDEX_READ_ENTRIES,
            max_bytes=READ_BATCH_BYTES,
            up_to=last,
        )
        if not entries or entries[0].position != Position(ledger_id, index.entries):
            return False
        index.add(entry.data for entry in entries)
        return True

    async def _load(self, ledger_id: int) -> LedgerIndex | None:
        """The stored index, if it covers the ledger."""
        info = self._core.ledgers.get(ledger_id)
        if info is None or not info.closed_ms:
            return None
        record = await self._core.stores.metadata.get(index_key(ledger_id))
        if record is None:
            return None
        try:
            index = LedgerIndex.decode(record.value)
        except BrokenIndex as error:
            log.warning("entry_index_unreadable", ledger=ledger_id, error=str(error))
            return None
        # An ended ledger never changes: an index over all its entries is right, whoever wrote it.
        return index if index.entries == info.entries else None

    def _save(self, ledger_id: int, index: LedgerIndex) -> None:
        self._start(partial(self._put, ledger_id, index.encode()), "entry_index_not_stored")

    async def _put(self, ledger_id: int, value: bytes) -> None:
        metadata = self._core.stores.metadata
        await metadata.put(index_key(ledger_id), value)
        if self._core.ledgers.get(ledger_id) is None:
            await metadata.delete(index_key(ledger_id))

    def _start(self, work: Callable[[], Awaitable[None]], failed: str) -> "asyncio.Task[None]":
        async def logged() -> None:
            # An index can be built again, so a failure here fails nothing else.
            try:
                await work()
            except MagnetarError as error:
                log.warning(failed, name=self._core.name, error=str(error))

        return self._saves.start(logged())

    async def close(self) -> None:
        """Stop building indexes, and wait for those that are being stored."""
        if self._ahead is not None:
            self._ahead.cancel()
        for building in self._building.values():
            building.cancel()
        while left := {*self._saves.running, *self._building.values()}:
            await asyncio.wait(left)
